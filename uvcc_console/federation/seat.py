"""A domain's seat in a federated run: which proposal, as which party, at which rendezvous. It lies in the run's folder.

The token that lets this domain in at the rendezvous lies beside it (0600); the domain's key stays where it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

from uvcc_console.federation import domain_key
from uvcc_console.federation.domain_key import DomainKey
from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files.files import write_atomic, write_failed
from uvcc_engine.contract.text import clean
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.signed.proposals import FILE as PROPOSAL_FILE
from uvcc_engine.transcript.signed.proposals import Standing
from uvcc_engine.transcript.terms.proposal import Proposal

FILE: Final = "seat.json"
TOKEN: Final = "rendezvous.token"
ATTEMPTS: Final = "attempts"
WAIT_S: Final = 900.0
SILENCE_S: Final = 90.0
_CLAIM_TRIES: Final = 20
_CLAIM_AGAIN_S: Final = 0.5
_LONGEST_NAME: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatTerms:
    """``relay``, ``ca_file``: the rendezvous. ``wait_s``: how long the others are waited for before they were heard at
    all; ``silence_s``: how long one that was heard may be silent before it counts as gone."""

    relay: str
    ca_file: str = ""
    wait_s: float = WAIT_S
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        if self.wait_s <= 0 or self.silence_s <= 0:
            raise ConfigError("a domain is waited for some time", "--wait and --silence in seconds, more than 0")


@dataclass(frozen=True, slots=True)
class Seat:
    """A run's seat with what it needs to speak for its domain."""

    proposal: Proposal
    party: int
    key: DomainKey
    token: str
    terms: SeatTerms

    def there(self) -> Rendezvous:
        """The rendezvous; one for each thread, for it remembers what it has read."""
        return Rendezvous(self.terms.relay, self.token, self.terms.ca_file)


def take(run_dir: Path, terms: SeatTerms, token: str) -> None:
    """Write a seat down, before the conductor starts. Raises UvccError."""
    write_atomic(run_dir / TOKEN, token.encode(), mode=0o600)
    write_atomic(run_dir / FILE, json.dumps(asdict(terms)).encode(), mode=0o600)


def of(run_dir: Path) -> Seat | None:
    """The seat of a run; None where one operator drives all three domains. Raises UnreadableError, ConfigError."""
    if not (run_dir / FILE).exists():
        return None
    terms = strict.read(SeatTerms, reading.read_json(run_dir / FILE), FILE)
    proposal = Standing.from_json(reading.read_json(run_dir / PROPOSAL_FILE)).signed.proposal
    key = domain_key.load()
    token = reading.read_text(run_dir / TOKEN).strip()
    return Seat(proposal, proposal.party_of(key.public), key, token, terms)


def next_attempt(seat: Seat) -> int:
    """The lowest attempt that this domain has not begun of its seat's proposal."""
    path = _attempts(seat)
    return int(reading.read_text(path).strip()) + 1 if path.exists() else 0


def begin_attempt(seat: Seat, attempt: int) -> None:
    """Note, durably, that this attempt was begun: it is never begun again. Raises UvccError."""
    path = _attempts(seat)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(path, str(attempt).encode(), mode=0o600)


def claim(seat: Seat, run: str, sleep: Callable[[float], None] = time.sleep) -> BinaryIO:
    """Take this domain's place at the table, for as long as this process lives; what is returned holds it.

    Two conductors of one domain sign against each other: the others would keep that as proof that it lies, and a second
    one that begins another attempt ends the first one's run. One that is about to end is waited for. Raises ConfigError
    naming the run that has the place, UvccError.
    """
    path = _attempts(seat).with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
        for left in range(_CLAIM_TRIES, -1, -1):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    other = clean(held.read(_LONGEST_NAME).decode(errors="replace"))
                    held.close()
                    what = f"another conductor of this domain runs this proposal: {other or 'a run of this home'}"
                    raise ConfigError(what, f"wait for its end, or end it: uvcc teardown {other or 'RUN'}") from None
                sleep(_CLAIM_AGAIN_S)
        held.truncate(0)
        held.write(run.encode())
    except OSError as e:
        raise write_failed(path, e) from e
    return held


def _attempts(seat: Seat) -> Path:
    return seat.key.folder / ATTEMPTS / seat.proposal.id
