"""Where a training's figures go besides its own files: Weights & Biases, MLflow, and whatever else is plugged in."""
