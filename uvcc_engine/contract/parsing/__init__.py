"""Values, objects and names from elsewhere, read totally or refused by name."""
