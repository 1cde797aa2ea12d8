"""The hash by which a policy names a job's model. Standard library only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from uvcc_engine.contract.parsing.canonical import canonical


def model_hash(job: Mapping[str, Any]) -> str:
    """Of the model and the seed that its initial weights follow from, as the policy's ``job`` has them; in hex."""
    named = {"model": job["model"], "seed": job["seed"]}
    return hashlib.sha256(b"UVCC_MODEL_V1" + canonical(named)).hexdigest()
