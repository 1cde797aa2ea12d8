"""What of a run's computation is proved before a step opens anything: ``job.verify``, and its words for people.

The words claim no more than holds, and name what is not proved.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from uvcc_engine.contract.errors import ConfigError

ProofMode = Literal["off", "products", "proofs"]
OFF: Final = "off"
PRODUCTS: Final = "products"
PROOFS: Final = "proofs"
MODES: Final[tuple[str, ...]] = get_args(ProofMode)
_NOT_YET: Final = {
    "covert": "no party is audited by chance while a run goes on",
}
_PROVED: Final = (
    "every product and its truncation is proved before its step reveals anything or commits a checkpoint: a false one"
    " passes with a chance of at most 2^-40 a step, if at most one of the three domains is corrupt",
    "not proved: comparisons, choices by bits, exponentials, look-ups and what is dealt for them; a domain that"
    " alters one of these can go unnoticed",
)
_EVERYTHING: Final = (
    "every message between the domains is proved to be what the protocols make of the shares before its step reveals"
    " anything or commits a checkpoint, products, comparisons, choices and what is dealt for them: a false one passes"
    " with a chance of at most 2^-40 a step, if at most one of the three domains is corrupt",
)
_NOTHING: Final = ("no product is proved: a domain that alters one goes unnoticed",)


def why_not(value: object) -> str:
    """Why there is no mode of that name; empty if there is."""
    if isinstance(value, str) and value in MODES:
        return ""
    reason = _NOT_YET.get(value, "") if isinstance(value, str) else ""
    return f"there is no such mode{reason and ': ' + reason}; give {', '.join(MODES)}"


def check_mode(value: object) -> str:
    """The mode, if there is one of that name. Raises ConfigError; for what is not built yet, with the reason."""
    if reason := why_not(value):
        raise ConfigError(f"job.verify is {str(value)[:80]!r}", reason)
    return str(value)


def sentences(mode: str) -> tuple[str, ...]:
    """What a run of this mode proves and what not."""
    return {PRODUCTS: _PROVED, PROOFS: _EVERYTHING}.get(mode, _NOTHING)
