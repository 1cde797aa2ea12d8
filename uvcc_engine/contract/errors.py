"""The one error hierarchy of UVCC. Every error says what is wrong and what the operator can do: its hint.

What it says may quote a file, a peer or a provider, and ends on a terminal or in a journal: it is cleaned here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from uvcc_engine.contract.text import clean_block


def _line(text: str) -> str:
    """The text in one line: a column's name, or another program's words, may hold what would begin the next one."""
    return clean_block(text).replace("\n", " ")


class UvccError(Exception):
    """Something an operator can act on: ``what`` happened, and the ``hint``."""

    exit_code = 1

    def __init__(self, what: str, hint: str = "") -> None:
        what = _line(what)
        super().__init__(what)
        self.what = what
        self.hint = _line(hint)

    def __str__(self) -> str:
        return f"{self.what} ({self.hint})" if self.hint else self.what


class ConfigError(UvccError):
    """A profile, job or option is wrong; names the key and the nearest known one."""

    exit_code = 2


class UnreadableError(UvccError):
    """A file that must be read is missing, cut short or not of its format."""

    exit_code = 2


class ProtocolError(UvccError):
    """A party broke the protocol; ``party`` names it (-1 where it cannot be told)."""

    exit_code = 3

    def __init__(self, what: str, hint: str = "", *, party: int = -1) -> None:
        super().__init__(what, hint)
        self.party = party


class FoundLiar(Protocol):
    """What the second round after a failed proof found (``proofs.second_round.SecondRoundFinding``)."""

    @property
    def named(self) -> int:
        """Who lied, -1 where two may have."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """One of them lied."""

    @property
    def open_to(self) -> tuple[int, ...]:
        """Who may have lied by what all three say."""

    @property
    def own(self) -> tuple[int, ...]:
        """Whom this party suspects by its own sight; empty where by its own numbers it is this party."""

    @property
    def stated(self) -> Mapping[int, tuple[int, ...] | None]:
        """Whom each party suspects, None where it was silent."""

    @property
    def why(self) -> str:
        """What the one that is named did."""

    @property
    def sentence(self) -> str:
        """The same in words."""


class ProofFailedError(ProtocolError):
    """A step's proof does not hold. ``pair``: the parties of whom one lied, as this party must see it, which knows of
    itself that it did not; ``prover``: whose proof it is, -1 where it is about what the pair opened under masks."""

    def __init__(self, what: str, hint: str = "", *, pair: tuple[int, ...] = (), prover: int = -1) -> None:
        super().__init__(what, hint)
        self.pair, self.prover = pair, prover
        self.finding: FoundLiar | None = None

    def settled(self, finding: FoundLiar) -> ProofFailedError:
        """This failure with what the second round found."""
        self.finding, self.party = finding, finding.named
        self.what = f"{self.what}; {finding.sentence}"
        self.args = (self.what,)
        return self


class RingRangeError(UvccError):
    """A secret number left the range in which protocols compute rightly. Seen in a debugging mode only."""


class PeerLostError(UvccError):
    """A party gave no sign of life for longer than the agreed wait."""

    exit_code = 4

    def __init__(self, what: str, hint: str = "", *, party: int = -1) -> None:
        super().__init__(what, hint)
        self.party = party


class VerificationError(UvccError):
    """Evidence does not hold; ``check`` names the first thing that failed, ``finding`` says how."""

    def __init__(self, check: str, what: str, hint: str = "") -> None:
        super().__init__(f"{check}: {what}", hint)
        self.check = _line(check)
        self.finding = _line(what)


class UnreachableError(UvccError):
    """A pod, relay or provider cannot be reached. Its state is unknown, never assumed."""

    exit_code = 5
