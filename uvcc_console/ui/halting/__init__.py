"""F9 and Esc, from the key to the order, and what makes room for them on the screen."""
