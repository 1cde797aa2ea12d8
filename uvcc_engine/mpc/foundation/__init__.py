"""What every protocol stands on: shares, pairwise random streams, message rounds, openings, the runtime."""
