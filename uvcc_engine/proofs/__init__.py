"""Verified computation: proofs that the messages of a step are what the protocols make of the shares."""
