"""What the console offers, in two tables: its keys with what they do, and its panels with where they stand."""
