"""How bytes are spelled and read: canonical JSON, bounded reading, kinds of messages."""
