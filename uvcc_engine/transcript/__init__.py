"""Transcript, Merkle roots, policy, proof bundle, signatures and the verifier. No torch."""
