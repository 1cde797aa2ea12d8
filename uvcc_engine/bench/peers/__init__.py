"""Other systems on the same work, where they are installed."""
