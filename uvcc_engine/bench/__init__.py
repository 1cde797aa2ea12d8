"""Every benchmark that the README quotes."""
