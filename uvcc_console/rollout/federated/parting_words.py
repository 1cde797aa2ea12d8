"""What the other domains are told of why this one goes no further: nothing of its accounts, machines and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from uvcc_console.core.snapshot import Snapshot

_OWN_BUSINESS: Final = frozenset({"quote", "provision", "bootstrap", "preflight"})
"""Stages that end by what a provider or a machine answers: a price, an account, a login, a path."""


def parting_words(s: Snapshot, detail: str) -> str:
    """``detail``: why the run ended, as this domain's own console says it."""
    failed = next((stage.name for stage in s.stages if stage.status == "failed"), "")
    if failed in _OWN_BUSINESS:
        return f"it could not bring up its pods, at {failed}; its own console says why"
    for pod in s.pods.values():
        login, _, port = pod.address.rpartition(":")
        for address in (pod.address, login if port.isdigit() else ""):
            detail = detail.replace(address, pod.pod) if "@" in address else detail
    home = str(Path.home())
    return detail.replace(home, "~") if len(home) > 1 else detail
