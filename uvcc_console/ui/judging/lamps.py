"""Signs of life of whatever a run depends on here: its conductor, its halt sidecar, and every path a halt can take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from uvcc_console.core import pod_states
from uvcc_console.core.snapshot import Snapshot

MOVING, STARTING, FROZEN, DEAD = "moving", "starting", "frozen", "dead"
START_LOOKS: Final = 20


@dataclass(frozen=True, slots=True)
class Lamp:
    """``state``: moving | starting | frozen | dead; ``words``: how it is, where that is more than the state."""

    state: str = MOVING
    words: str = ""

    @property
    def well(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.state in (MOVING, STARTING)


class Watchman:
    """Judges one process from looks at it. One that is to start gets its time in looks at which nothing moved.

    Looks, not seconds: on a crowded machine they come as seldom as the process that starts gets its turn. A journal
    that grows is a sign of life of whoever starts.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._seq = -1

    def look(self, found: Lamp, seq: int, behind: bool = False) -> Lamp:
        """``found`` is what the process's own record says; ``seq``: how far the journal was read."""
        if found.state != STARTING or seq != self._seq or behind:
            self._looks, self._seq = 0, seq
            return found
        self._looks += 1
        return found if self._looks < START_LOOKS else Lamp(DEAD, "none has come up")


def needs_sidecar(s: Snapshot) -> bool:
    """Whether there is anything that the sidecar would halt."""
    return not s.ended and any(p.state not in pod_states.ABSENT for p in s.pods.values())


def halt_paths(s: Snapshot) -> Mapping[str, tuple[int, int]]:
    """By path of a halt: over how many pods it is up, and how many have it."""
    out: dict[str, tuple[int, int]] = {}
    for pod in s.pods.values():
        if pod.state in pod_states.UNREACHABLE:
            continue
        for name, (up, _) in pod.paths.items():
            ups, known = out.get(name, (0, 0))
            out[name] = (ups + up, known + 1)
    return out
