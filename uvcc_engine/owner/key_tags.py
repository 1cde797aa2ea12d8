"""How owners who hold columns of the same rows find these rows: by tags of their keys, under a key of the owners alone.

Each owner draws a secret and seals it to every other owner; the joint key is derived from all of them, for one attempt
of one proposal. A row's tag is HMAC-SHA-256 of its key under the joint key, cut to 16 bytes. Owners seal their lists of
tags to each other, sorted, and filled with random ones up to a power of two; the rows are those whose tags are in all
lists, in the order of their tags. Whoever lacks the joint key learns nothing from a tag; an owner, who has it, can test
guesses of another's keys.
"""

from __future__ import annotations

import hmac
import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.data.csv_table import CsvTable, is_missing
from uvcc_engine.sealing.box import seal, unseal
from uvcc_engine.sealing.box_keys import derive, sha256
from uvcc_engine.transcript.signing.identity import Identity

TAG_BYTES: Final = 16
FEWEST_TAGS: Final = 256
_SECRET: Final = 32
_FORMS_VERSION: Final = 1
"""Of how keys are compared: owners whose code compares otherwise do not match, and are told so."""


@dataclass(frozen=True, slots=True)
class JoinUse:
    """What owners put rows together for: one attempt of one proposal; ``owners``: their X25519 keys (hex), in order."""

    proposal: str
    attempt: int
    owners: tuple[str, ...]
    join: ColumnJoin

    def about(self, what: str) -> dict[str, Any]:
        """What a box says that it is; authenticated, and not secret."""
        return {
            "format": f"uvcc-join-{what}",
            "proposal": self.proposal,
            "attempt": self.attempt,
            "key": self.join.key,
            "form": f"{self.join.form}-{_FORMS_VERSION}",
        }

    def sealed(self, plain: bytes, what: str, sender: Identity, to: str) -> bytes:
        """A box that the owner ``to`` opens for this use alone."""
        return seal(plain, sender=sender, to=to, about=self.about(what))

    def opened(self, box: bytes, what: str, recipient: Identity, sender: str) -> bytes:
        """What ``sender`` sealed to ``recipient`` for this use. Raises VerificationError naming the owner."""
        who = f"owner {self.owners.index(sender)} ({sender[:12]})"
        try:
            plain, about = unseal(box, recipient=recipient, sender=sender)
        except VerificationError as error:
            raise VerificationError("join", f"{who}: {error}", "have it share again") from error
        wanted = self.about(what)
        if about != wanted:
            different = [k for k in sorted({*about, *wanted}) if about.get(k) != wanted.get(k)]
            said = ", ".join(f"{k} {str(about.get(k))[:40]!r} in place of {wanted.get(k)!r}" for k in different)
            raise VerificationError(
                "join", f"{who} puts rows together otherwise: {said}", "all owners take one proposal and one version"
            )
        return bytes(plain)

    def key(self, secrets: Mapping[str, bytes]) -> bytes:
        """The joint key, from every owner's secret. Raises ConfigError naming an owner whose secret is none."""
        for number, owner in enumerate(self.owners):
            if len(secrets.get(owner, b"")) != _SECRET:
                raise ConfigError(f"owner {number} ({owner[:12]}) gave no secret of {_SECRET} bytes", "it shares again")
        salt = sha256(canonical([self.proposal, self.attempt, list(self.owners), self.join.to_json()]))
        return derive(b"".join(secrets[owner] for owner in self.owners), "join-key", salt)


def new_secret() -> bytes:
    """What one owner adds to the joint key."""
    return os.urandom(_SECRET)


def tags_of(table: CsvTable, join: ColumnJoin, key: bytes) -> list[bytes]:
    """The tag of every row. Raises ConfigError naming a row whose key is missing or of another form, not the key."""
    cells = table.column(join.key)
    found = []
    for row, cell in enumerate(cells):
        if is_missing(cell):
            raise ConfigError(f"{table.place(row, join.key)} has no key", "fill it in or take the row out")
        same = comparable(cell, join)
        if same is None:
            raise ConfigError(
                f"{table.place(row, join.key)} holds a key that is no whole number",
                "mend it, or agree on join.form: text",
            )
        found.append(hmac.digest(key, same.encode(), "sha256")[:TAG_BYTES])
    return found


def comparable(cell: str, join: ColumnJoin) -> str | None:
    """A key as it is compared; None if it is not of the form that the job names."""
    if join.form == "text":
        return " ".join(unicodedata.normalize("NFKC", cell).casefold().split())
    if join.form == "exact":
        return cell
    digits = cell.removeprefix("-") if cell.startswith("-") else cell.removeprefix("+")
    if not digits.isascii() or not digits.isdigit():
        return None
    bare = digits.lstrip("0") or "0"
    return f"-{bare}" if cell.startswith("-") and bare != "0" else bare


def check_distinct(tags: Sequence[bytes], file: str) -> None:
    """Refuse (ConfigError, naming both rows) a table in which a key stands twice."""
    seen: dict[bytes, int] = {}
    for row, tag in enumerate(tags, 1):
        if (first := seen.setdefault(tag, row)) != row:
            raise ConfigError(
                f"{file}: rows {first} and {row} have the same key", "one row for each key: put them together"
            )


def packed(tags: Sequence[bytes]) -> bytes:
    """A list of tags as it is sealed: sorted, and filled with random tags up to a power of two."""
    size = FEWEST_TAGS
    while size < len(tags):
        size *= 2
    filler = os.urandom(TAG_BYTES * (size - len(tags)))
    more = [filler[at : at + TAG_BYTES] for at in range(0, len(filler), TAG_BYTES)]
    return b"".join(sorted([*tags, *more]))


def unpacked(data: bytes, who: str) -> set[bytes]:
    """The tags of another owner's list. Raises VerificationError if it is none."""
    found = {data[at : at + TAG_BYTES] for at in range(0, len(data), TAG_BYTES)}
    if len(data) < FEWEST_TAGS * TAG_BYTES or len(data) % TAG_BYTES or len(found) * TAG_BYTES != len(data):
        raise VerificationError("join", f"{who} sent a list of keys that is none", "its program is another one")
    return found


def common(mine: Sequence[bytes], others: Sequence[set[bytes]]) -> list[bytes]:
    """The tags that are in all lists, in the order that all owners share their rows in."""
    return sorted(set(mine).intersection(*others))


def order_digest(order: Sequence[bytes], key: bytes) -> str:
    """What an owner signs of the rows and their order: equal where all took the same; tells nobody without the key."""
    return hmac.digest(key, b"UVCC_JOINED_V1" + b"".join(order), "sha256").hex()


def positions(tags: Sequence[bytes], order: Mapping[bytes, int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each row stands among the common ones, ``[rows]``; -1 for one that is not among them."""
    return np.array([order.get(tag, -1) for tag in tags], dtype=np.int64)
