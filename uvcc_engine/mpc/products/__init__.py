"""Linear operations, products and the truncations that follow them."""
