"""Secret bits: comparisons, selections by a bit, maxima, permutations."""
