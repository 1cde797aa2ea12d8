"""Pieces of work that several benchmarks measure."""
