"""Every benchmark that docs/benchmarks.md quotes."""
