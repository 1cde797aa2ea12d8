"""Triton kernels of the three branches. Triton's interpreter runs them without a GPU (``TRITON_INTERPRET=1``)."""
