"""Vendors of pods that are one operator each: a file says how its API is asked and what its answers mean."""
