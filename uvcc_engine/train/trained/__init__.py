"""A trained model: its folder, other libraries' format of it, continuing a text, and what it can do."""
