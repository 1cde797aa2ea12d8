"""The console's own benchmarks: every figure of docs/benchmarks.md about the console and the main job is from here."""
