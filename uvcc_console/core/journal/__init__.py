"""What is kept of a run on disk: the journal of its events, and the snapshot and summary beside it."""
