"""Checkpoints of a run directory: how one is written, and whether one that lies there may be used."""
