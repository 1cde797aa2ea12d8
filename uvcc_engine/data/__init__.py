"""Data sets, data files and the order of batches: the public side of the data. NumPy only, no torch, no network."""
