"""Names of files that pass between a data owner's program, the console that runs it, and the pods."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import ConfigError

REQUEST: Final = "request.json"
"""What a data owner is asked for: whom to seal for, and under which job."""
COMMITMENTS: Final = "commitments.json"
"""What the sealed shares are bound to, beside them."""
SHARE: Final = "share.json"
"""What the owner's program made of a request, before it is signed."""
PREPROCESSING: Final = "preprocessing.yaml"
"""The schema with the statistics of the training rows."""
TOKENIZER: Final = "own_tokenizer.json"
"""Beside it: the owner's own tokenizer, where a text is read by one; the schema names it as lying there."""
MODEL: Final = "model.json"
WEIGHTS: Final = "weights.npz"
STATISTICS: Final = "statistics.npz"
"""Mean and deviation of each column, or its least value (lower quantile) and width, ``[features]``, where the job
standardised in shares and reveals them."""
STATISTIC_TENSORS: Final = {
    "deviation": ("statistics.mean", "statistics.inverse"),
    "range": ("statistics.least", "statistics.inverse"),
    "quantiles": ("statistics.lower", "statistics.inverse"),
}
"""The same among what is sealed to the owner, ``[1, features]``, by ``job.standardise_by``: what a column is moved by,
and one over what it is divided by; with quantiles it is then cut to 0 to 1."""
STATISTIC_WORDS: Final = {
    "statistics.mean": ("mean", "deviation"),
    "statistics.least": ("least", "width"),
    "statistics.lower": ("lower", "width"),
}
"""What both are called in the owner's file."""
INFORMATION_TENSORS: Final = ("information.matrix", "information.sizes")
"""What standard errors follow from, among what is sealed to the owner: the mean information of a row ``[k, k]``, and
``[1, 3]``: rows, mean squared residual, and 1 where the variance is estimated from it (else 0)."""
COEFFICIENTS: Final = "coefficients.csv"
"""A regression's coefficients with their standard errors, one line each, the intercept last."""
TENSORS: Final = "model.safetensors"
ADAPTERS: Final = "adapters.safetensors"
"""What was trained in secret beside a public base, as the run sealed it; merged with the base it is the model."""
BASE: Final = "base.safetensors"
"""The public base of a job, in the run's folder and on every pod."""
WAITS: Final = "waits"
"""With this word a line on the owner's program's standard error begins that tells of a wait, and is no error."""
CARD: Final = "MODEL_CARD.md"
NO_SCHEMA: Final = "none"
"""In a schema's place: every column of the table is a number that is trained on, and no schema beside it counts."""


def schema_beside(data: Path) -> Path:
    """Where ``uvcc data infer`` writes the schema of a table."""
    return data.parent / f"{data.stem}.schema.yaml"  # with_name would refuse ".", a folder that somebody named


def named_schema(data: Path | None, schema: Path | None) -> Path | None:
    """The schema that a table is read by; None if it has none.

    Raises ConfigError if one lies beside the table and nobody says whether it holds: without it, names and numbers of
    persons would be trained on like any other column.
    """
    if schema is not None:
        return None if str(schema) == NO_SCHEMA else schema
    beside = None if data is None else schema_beside(data)
    if beside is None or not beside.is_file():
        return None
    raise ConfigError(
        f"{beside.name} lies beside {data}, and nobody says whether it holds",
        f"say `schema: {beside}` under job (--schema {beside} in a command), or `{NO_SCHEMA}` in its place to train on"
        " every column as it is",
    )
