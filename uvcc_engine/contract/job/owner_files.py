"""Names of files that pass between a data owner's program, the console that runs it, and the pods."""

from __future__ import annotations

from typing import Final

REQUEST: Final = "request.json"
"""What a data owner is asked for: whom to seal for, and under which job."""
COMMITMENTS: Final = "commitments.json"
"""What the sealed shares are bound to, beside them."""
SHARE: Final = "share.json"
"""What the owner's program made of a request, before it is signed."""
PREPROCESSING: Final = "preprocessing.yaml"
"""The schema with the statistics of the training rows."""
MODEL: Final = "model.json"
WEIGHTS: Final = "weights.npz"
TENSORS: Final = "model.safetensors"
CARD: Final = "MODEL_CARD.md"
