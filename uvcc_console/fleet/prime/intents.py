"""What the console is about to create, on disk before the provider hears of it. Survives ``kill -9``."""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from uvcc_engine.contract.errors import UvccError

FILE = "prime_intents.jsonl"
_NAME = re.compile(r"(?P<base>.+-p\d+r\d+)x[0-9a-z]{6}")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def attempt_name(base: str) -> str:
    """A name never used before for one more try at pod ``base``; it still says whose it is."""
    return f"{base}x{''.join(secrets.choice(_ALPHABET) for _ in range(6))}"


def base_of(name: str) -> str:
    """The pod that an attempt was for: ``uvcc-RUN-p0r1xk3f9a2`` -> ``uvcc-RUN-p0r1``; "" for a name not of ours."""
    found = _NAME.fullmatch(name)
    return found["base"] if found and name.startswith("uvcc-") else ""


@dataclass(frozen=True, slots=True)
class Intents:
    """Append-only, fsynced. Lines: {ts, name, offer} before a create, then {ts, name, id | refused | absent | gone}."""

    path: Path

    @classmethod
    def of(cls, run_dir: Path) -> Intents:
        return cls(run_dir / FILE)

    def note(self, ts: float, **fields: object) -> None:
        """Raises UvccError if the disk refuses; then nothing may be created."""
        line = json.dumps({"ts": round(ts, 3), **fields}) + "\n"
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(fd, line.encode())
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as e:
            raise UvccError(f"cannot write {self.path}: {e.strerror}", "free disk space; no pod was created") from e

    def open(self, prefix: str) -> dict[str, float]:
        """Names that may have a pod, and when they were last heard of: not refused, not given up, not proven gone.

        A line cut short by a crash is no intent: it was not yet synced, so nothing was sent.
        """
        try:
            lines = self.path.read_text().splitlines()
        except OSError:
            return {}
        found: dict[str, float] = {}
        for line in lines:
            try:
                row = json.loads(line)
                name, ts = str(row["name"]), float(row["ts"])
            except (ValueError, KeyError, TypeError):
                continue
            if {"gone", "refused", "absent"} & set(row):
                found.pop(name, None)
            elif name.startswith(prefix):
                found[name] = ts
        return found
