"""A folder becomes a run of the console's own: its journal, and what is known of where it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.follow.shells import Shell, shell_for
from uvcc_console.follow.target import FollowTarget
from uvcc_console.runs.processes import new_folder
from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.parsing.untrusted import as_int, as_object

STAGES: Final = ("connect", "follow")
_NOBODY: Final = "(followed)"


@dataclass(frozen=True, slots=True)
class Adoption:
    """Where a followed run is, and how one gets there: key file and jump host as they were given."""

    target: FollowTarget
    key: str = ""
    jump: str = ""

    def shell(self) -> Shell:
        """A shell there. Raises ConfigError for an SSH configuration that cannot be read."""
        return shell_for(self.target, key=self.key, jump=self.jump)


def create(adoption: Adoption, name: str = "") -> Path:
    """Write the run down: its folder, its journal, its adoption. Raises UvccError where it cannot be written."""
    with new_folder(name or adoption.target.label) as folder:
        (folder / paths.ADOPTED).write_text(json.dumps(asdict(adoption)), encoding="utf-8")
        journal = Journal(folder / paths.JOURNAL, source="cli")
        journal.append(
            ev.RunCreated(
                run=folder.name,
                profile_name="adopted",
                job_kind="command",
                replicas=1,
                pipeline_stages=1,
                tensor=1,
                stages=list(STAGES),
                # what no provider has a pod for, and no plan is made of: a command that is not ours
                profile={"job": {"kind": "command", "argv": [_NOBODY], "steps": 1}, "limits": {"ttl": 0.0}},
            ),
            ev.Followed(pod="p0r0", target=adoption.target.words, contract=False, no_halt="it was not looked at yet"),
        )
        journal.close()
        RunClock(folder)
    return folder


def read(run_dir: Path) -> Adoption:
    """What :func:`create` wrote down. Raises UnreadableError."""
    path = run_dir / paths.ADOPTED
    try:
        found = as_object(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as e:
        raise UnreadableError(f"cannot read {path}: {e}", "adopt the folder again") from e
    target = found.get("target")
    if not isinstance(target, dict) or not isinstance(target.get("folder"), str) or not target["folder"]:
        raise UnreadableError(f"{path} names no folder", "adopt the folder again")
    port = as_int(target.get("port", 0), 0, 65535) or 0
    where = FollowTarget(target["folder"], str(target.get("host", "")), str(target.get("user", "")), port)
    return Adoption(where, str(found.get("key", "")), str(found.get("jump", "")))
