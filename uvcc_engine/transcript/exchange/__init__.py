"""How the workers of a run keep and exchange their evidence, and read their own again."""
