"""The transcript itself: leaves, Merkle trees, the stores of an epoch, histories of epochs."""
