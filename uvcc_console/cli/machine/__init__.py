"""Verbs about this machine and installation."""
