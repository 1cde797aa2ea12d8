"""The cross-party message plane: frames, exactly-once channels, secure sessions, links."""
