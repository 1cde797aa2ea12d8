"""What starts the processes of a benchmark: fleets of workers, three parties, a relay and links."""
