"""What each key and command of the operator does."""
