"""Topology, ids, process groups and schedules."""
