"""Verbs that only read: what runs are doing and what they logged."""
