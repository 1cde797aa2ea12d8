"""Following a run without a screen, and the documents that verbs print of it."""
