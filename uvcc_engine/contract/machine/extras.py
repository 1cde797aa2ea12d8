"""What parts of the program need beyond a plain installation, and which of its extras brings it."""

from __future__ import annotations

import importlib.util
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UvccError

EXTRAS: Final = {
    "torch": "local",
    "numba": "kernels",
    "nats": "nats",
    "datasets": "train",
    "tiktoken": "train",
    "tokenizers": "train",
    "tensorboard": "train",
    "matplotlib": "report",
    "zstandard": "report",
    "sklearn": "test",
    "pyarrow": "data",
    "PIL": "data",
    "lm_eval": "evaluation",
    "wandb": "wandb",
    "mlflow": "mlflow",
}


class MissingExtraError(UvccError):
    """Part of the program needs a module that only an extra brings."""

    def __init__(self, module: str, what: str) -> None:
        super().__init__(f"{what}, and {module} is not installed", f"pip install 'uvcc[{EXTRAS[module]}]'")
        self.module = module


def hint_for(error: Exception) -> str:
    """What to install where an import failed; empty if no extra would help."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    return f"pip install 'uvcc[{EXTRAS[name]}]'" if name in EXTRAS else ""


def require(module: str, what: str) -> None:
    """Raise ConfigError, naming the extra to install, unless ``module`` can be imported. It is not imported here."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{what}, and {module} is not installed", f"pip install 'uvcc[{EXTRAS[module]}]'")
