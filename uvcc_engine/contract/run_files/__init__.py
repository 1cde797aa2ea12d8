"""The files of one run directory, and the only ways in which they are written and read."""
