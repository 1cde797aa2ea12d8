"""The lease: without a sign of life from its holder for so long, the agent halts its runs by itself."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from uvcc_engine.contract.errors import UnreadableError, UvccError
from uvcc_engine.contract.run_files import files

log = logging.getLogger(__name__)


@dataclass
class Lease:
    """``ttl_s`` 0 = no lease. Times are of the monotonic clock; another agent after a crash starts a fresh term."""

    path: Path
    ttl_s: float = 0.0
    holder: str = ""
    expires: float = 0.0
    fired: bool = False

    @classmethod
    def load(cls, path: Path, now: float) -> Lease:
        lease = cls(path)
        try:
            found = files.read_json(path)
            lease.ttl_s, lease.holder = float(found["ttl_s"]), str(found["holder"])
        except (UnreadableError, KeyError, ValueError, TypeError):
            return lease
        lease.expires = now + lease.ttl_s
        return lease

    def renew(self, ttl_s: float, holder: str, now: float) -> None:
        """Begin a new term; 0 gives the lease up."""
        if (ttl_s, holder) != (self.ttl_s, self.holder):
            try:
                files.write_json(self.path, {"ttl_s": ttl_s, "holder": holder}, mode=0o600, durable=False)
            except UvccError as error:
                log.error("the lease is not on disk: %s", error)  # a full disk must not keep a console out
        self.ttl_s, self.holder, self.expires, self.fired = ttl_s, holder, now + ttl_s, False

    def expired(self, now: float) -> bool:
        """True once per missed term."""
        if self.ttl_s <= 0 or self.fired or now < self.expires:
            return False
        self.fired = True
        return True
