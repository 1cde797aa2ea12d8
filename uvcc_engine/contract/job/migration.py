"""Where a job starts that goes on from another job's checkpoint: on another topology, or after a pod was lost.

The new job has a policy of its own, signed by all three parties, with a session id and therefore masks of its own. It
names the policy it descends from and the checkpoint, by the hash of its COMMIT record, which the three parties of the
old policy signed. ``root`` is the first policy of the chain of migrations. ``restored`` lists the parties of which,
somewhere in the chain, no pod went on: their shares were handed to an identity that nobody of that party has vouched
for. It never lists more than one, for whoever passes off machines of their own as two lost parties would learn
everything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import canonical

MOST_RESTORED: Final = 1
_FIELDS: Final = ("commit", "of", "restored", "root", "step")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Migration:
    """``of``, ``root``: policy hashes (hex); ``step``: steps that were done; ``commit``: :func:`record_hash`."""

    of: str
    step: int
    commit: str
    root: str
    restored: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("of", "commit", "root"):
            if not _HEX.fullmatch(getattr(self, name)):
                raise ConfigError(f"job.start.{name} is {getattr(self, name)!r}", "it must be 64 lower-case hex digits")
        if self.step < 1:
            raise ConfigError(f"job.start.step is {self.step!r}", "it must be a whole number of at least 1")
        if list(self.restored) != sorted(set(self.restored)) or not set(self.restored) <= set(range(PARTIES)):
            raise ConfigError(f"job.start.restored is {list(self.restored)!r}", "list parties once each, in order")
        if len(self.restored) > MOST_RESTORED:
            raise ConfigError(
                f"parties {list(self.restored)} would have been handed to identities that none of their pods knows",
                "keep a pod of each party but one as the party's first, or start the job anew",
            )

    @classmethod
    def of_job(cls, job: Mapping[str, Any]) -> Migration | None:
        """Where a policy's job starts; None if at the beginning. Raises ConfigError naming the offending field."""
        return None if job.get("start") is None else cls.from_json(job["start"])

    @classmethod
    def from_json(cls, data: Any) -> Migration:
        """Read strictly. Raises ConfigError."""
        return strict.read(cls, strict.exact(data, _FIELDS, "job.start"), "job.start")

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        return found | {"restored": list(self.restored)}

    @property
    def leaf(self) -> bytes:
        """Payload of the START leaf, the first of the transcript's local leaves after the policy."""
        return canonical({"commit": self.commit, "of": self.of, "step": self.step})


def record_hash(record: Mapping[str, Any]) -> str:
    """What names a COMMIT record: SHA-256 (hex) of its canonical bytes."""
    return hashlib.sha256(b"UVCC_COMMIT_V1" + canonical(dict(record))).hexdigest()
