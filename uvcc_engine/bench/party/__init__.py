"""Programs of one process of a benchmark, each run by ``python -m``."""
