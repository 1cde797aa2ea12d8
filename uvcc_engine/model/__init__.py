"""Models on secret shares: jobs, layer specifications, layers, losses, optimisers, and their plaintext twins."""
