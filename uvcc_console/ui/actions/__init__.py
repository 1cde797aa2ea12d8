"""The one table of what an operator can do, and what each entry of it does."""
