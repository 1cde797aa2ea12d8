"""The relay service: an HTTP store-and-forward that sees sizes and times only."""
