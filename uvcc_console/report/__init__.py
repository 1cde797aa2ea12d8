"""Log bundle, figures, handoff and verification of files."""
