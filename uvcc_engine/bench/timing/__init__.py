"""How benchmarks measure: settings in turn, and the machine's own rates."""
