"""Verbs about what a run leaves: proof, logs, plots, hand-over."""
