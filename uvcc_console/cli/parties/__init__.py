"""Verbs of those who are not the operator: a data owner, one party's domain."""
