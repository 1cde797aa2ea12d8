"""Verbs that show the terminal interface, and how a rollout is shown or followed."""
