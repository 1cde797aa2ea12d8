"""Verbs that start a rollout or go on with one."""
