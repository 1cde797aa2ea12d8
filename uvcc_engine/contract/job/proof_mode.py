"""What of a run's computation is proved before a step opens anything: ``job.verify``, and its words for people.

The words claim no more than holds, and name what is not proved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from uvcc_engine.contract.errors import ConfigError

ProofMode = Literal["off", "products", "proofs", "covert"]
OFF: Final = "off"
PRODUCTS: Final = "products"
PROOFS: Final = "proofs"
COVERT: Final = "covert"
MODES: Final[tuple[str, ...]] = get_args(ProofMode)
AUDIT_ONE_IN: Final = 10
"""Of so many steps, one of a domain's is audited on average, where the job does not say."""
LEAST_ONE_IN, MOST_ONE_IN = 2, 100
"""One in one is ``proofs``; rarer than one in a hundred deters nobody."""
AUDIT_HINT: Final = (
    f"give a whole number from {LEAST_ONE_IN} to {MOST_ONE_IN}, like {AUDIT_ONE_IN}: one step in so many"
)
_DRAWS: Final = 1 << 64
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


def is_audited(drawn: int, one_in: int) -> bool:
    """Whether a number of 64 bits asks for an audit: so does at least one of ``one_in``."""
    return drawn * one_in < _DRAWS


def why_not(value: object) -> str:
    """Why there is no mode of that name; empty if there is."""
    if isinstance(value, str) and value in MODES:
        return ""
    return f"there is no such mode; give {', '.join(MODES)}"


def check_mode(value: object) -> str:
    """The mode, if there is one of that name. Raises ConfigError."""
    if reason := why_not(value):
        raise ConfigError(f"job.verify is {str(value)[:80]!r}", reason)
    return str(value)


@dataclass(frozen=True, slots=True)
class Proving:
    """What is proved of a job's computation: ``mode``, and with ``covert`` one step in ``audit_one_in`` (else 0)."""

    mode: str = OFF
    audit_one_in: int = 0

    @classmethod
    def of(cls, mode: object, audit_one_in: object = AUDIT_ONE_IN) -> Proving:
        """As a job names it. Raises ConfigError for an unknown mode, a rate out of bounds, or one that says nothing."""
        checked, given = check_mode(mode), audit_one_in
        if not isinstance(given, int) or isinstance(given, bool) or not LEAST_ONE_IN <= given <= MOST_ONE_IN:
            raise ConfigError(f"job.audit_one_in is {str(given)[:80]}", AUDIT_HINT)
        if checked == COVERT:
            return cls(checked, given)
        if given != AUDIT_ONE_IN:
            raise ConfigError(f"job.audit_one_in is {given} with verify: {checked}", "it belongs to verify: covert")
        return cls(checked)

    @classmethod
    def of_job(cls, job: Mapping[str, Any]) -> Proving:
        """Of a job's keys. Raises ConfigError."""
        return cls.of(job.get("verify", OFF), job.get("audit_one_in", AUDIT_ONE_IN))

    @property
    def everything(self) -> bool:
        """Whether a proof, where there is one, is of every message and not of products alone."""
        return self.mode in (PROOFS, COVERT)

    @property
    def word(self) -> str:
        """The mode, and how often, in one word that parties compare."""
        return f"{self.mode}, one in {self.audit_one_in}" if self.audit_one_in else self.mode

    @property
    def sentences(self) -> tuple[str, ...]:
        """What a run of this mode proves and what not."""
        if self.mode == COVERT:
            return _covert(self.audit_one_in)
        return {PRODUCTS: _PROVED, PROOFS: _EVERYTHING}.get(self.mode, _NOTHING)


def _covert(one_in: int) -> tuple[str, ...]:
    return (
        f"one domain's step in {one_in} is audited on average, drawn by the other two: a domain that alters a message"
        f" in one step is caught with a chance of 1 in {one_in}, less 2^-40, before that step reveals anything or"
        " commits a checkpoint, if at most one of the three domains is corrupt; no domain knows whether it is audited"
        " before all its messages of the step are with the other two",
        "not proved: every step that is not audited; a domain that alters a message in one goes unnoticed, and what is"
        " revealed and kept from then on may be wrong, and may tell more than was agreed",
    )
