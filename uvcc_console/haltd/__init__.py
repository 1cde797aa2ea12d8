"""The halt sidecar: its own process with its own warm connections."""
