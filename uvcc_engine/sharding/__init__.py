"""A model over many workers: layout, tensor, pipeline and data parallelism, microbatches, overlap."""
