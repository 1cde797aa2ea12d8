"""The arithmetic of proofs: polynomials over GF(2^64) and Galois rings, and sums under weights of zeros and ones."""
