"""Attention kernels per device."""
