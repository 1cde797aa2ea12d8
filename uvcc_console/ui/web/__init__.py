"""The console of one run in a browser: a guarded address of this machine, and one process a viewer."""
