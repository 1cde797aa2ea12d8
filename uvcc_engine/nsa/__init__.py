"""Native Sparse Attention."""
