"""A list of providers for the same pods: which one is chosen, and how the choice moves on."""
