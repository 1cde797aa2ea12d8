"""Pods that are processes of this machine: their SSH server, and what they import together."""
