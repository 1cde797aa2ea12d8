"""Learning on shares: objectives, optimizers, the training step, and its plaintext reference."""
