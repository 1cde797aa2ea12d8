"""Which code a process runs from: bootstrap writes the hash of the wheel beside the packages that it unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SITE: Final = Path(__file__).parents[3]
CODE_HASH: Final = "CODE_HASH"


def code_hash(site: Path = SITE) -> str:
    """SHA-256 of the wheel that lies unpacked in ``site``; "" where this process runs from a source tree."""
    try:
        return (site / CODE_HASH).read_text().strip()
    except OSError:
        return ""
