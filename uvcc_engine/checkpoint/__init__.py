"""Checkpoints of shares: encrypted at rest, committed by three parties, resharded and migrated to other pods."""
