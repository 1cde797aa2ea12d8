"""How to get into pods that an earlier run of this data folder kept, for a run that takes them over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal, read_summary
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.provider import POD_PREFIX
from uvcc_console.fleet.ssh_keys import KEY_FILE

if TYPE_CHECKING:
    from uvcc_console.plan.schema import Profile


def run_of(name: str) -> str:
    """The run that a pod's name belongs to; empty for a name of another form."""
    return name.removeprefix(POD_PREFIX).rpartition("-")[0] if name.startswith(POD_PREFIX) else ""


@dataclass(frozen=True, slots=True)
class KeptAccess:
    """How to get into the pods that an earlier run kept: its key file ("" = unknown here), their host keys by pod."""

    ssh_key: str = ""
    host_keys: Mapping[str, str] = field(default_factory=dict)


def kept_by(prefix: str) -> KeptAccess:
    """What this data folder knows about the pods under a prefix ``uvcc-RUN-``."""
    run_dir = paths.run_dir(run_of(f"{prefix}p0r0")) if prefix else None
    if run_dir is None or not (run_dir / paths.JOURNAL).exists():
        return KeptAccess()
    s = snapshot_of(run_dir)
    given = str(fleet_of(s).get("ssh_key", ""))
    own = run_dir / KEY_FILE
    return KeptAccess(
        given or (str(own) if own.exists() else ""), {p.pod: p.host_key for p in s.pods.values() if p.host_key}
    )


def with_kept_key(profile: Profile) -> Profile:
    """The profile of a run that takes pods over, with the key that opens them: conductor, halt sidecar, consoles and
    whoever signs an order for them read it there.
    """
    fleet = profile.fleet
    key = fleet.ssh_key or kept_by(fleet.attach_prefix).ssh_key
    return profile.model_copy(update={"fleet": fleet.model_copy(update={"ssh_key": key})})


def fleet_of(s: Snapshot) -> Mapping[str, Any]:
    """The profile's part about pods, as the journal has it."""
    found = s.profile.get("fleet")
    return found if isinstance(found, Mapping) else {}


def snapshot_of(run_dir: Path) -> Snapshot:
    """What a run's journal comes to. Raises UvccError where it cannot be read."""
    journal = Journal(run_dir / paths.JOURNAL, readonly=True)
    try:
        return read_summary(journal)
    finally:
        journal.close()
