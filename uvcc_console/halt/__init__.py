"""The halt: its ladder, its certificate, and the path over the relay. Used by the sidecar and by rollouts alike."""
