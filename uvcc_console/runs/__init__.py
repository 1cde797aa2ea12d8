"""A run as the operator's machine holds it: its processes, its domains, and the sweep for pods nobody looks after."""
