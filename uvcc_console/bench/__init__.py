"""The console's own benchmarks: every figure of the README about the console and the main job comes from here."""
