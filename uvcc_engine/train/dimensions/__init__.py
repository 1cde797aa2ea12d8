"""One dimension of the trainer's parallelism a file: parameters, heads and tokens shared among ranks."""
