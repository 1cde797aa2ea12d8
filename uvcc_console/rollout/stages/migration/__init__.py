"""Going on elsewhere: on other pods, from an earlier checkpoint, with shares handed over."""
