"""What carries frames between parties: direct connections, relays, NATS; none of them reads a body."""
