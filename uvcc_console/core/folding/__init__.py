"""The reducer and its parts: how events become the immutable snapshot. Pure."""
