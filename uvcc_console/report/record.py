"""A run as its reports see it: the journal and the folder of fetched files, read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import reduce
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.core.log import logger
from uvcc_console.core.paths import JOURNAL
from uvcc_console.core.snapshot import PodView, Snapshot
from uvcc_console.report.recheck import recheck
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.job.rollout_phases import PHASES as PHASES
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.transcript.proof.bundle import NAME, Bundle, read_bundle
from uvcc_engine.transcript.terms.policy import Policy

log = logger(__name__)

ARTIFACTS = "artifacts"
E = TypeVar("E", bound=ev.Event)


@dataclass(frozen=True)
class RunRecord:
    """One run. ``events`` are in the order of the journal; ``snapshot`` is their fold."""

    run_dir: Path
    events: Sequence[ev.Event]
    snapshot: Snapshot

    @classmethod
    def load(cls, run_dir: Path) -> RunRecord:
        """Read a run's journal. Raises UnreadableError if there is none."""
        snapshot, kept = Snapshot(), []
        for seq, event in iter_events(run_dir / JOURNAL):
            snapshot = reduce(snapshot, event, seq)
            kept.append(event)
        return cls(run_dir, kept, snapshot)

    @property
    def artifacts(self) -> Path:
        return self.run_dir / ARTIFACTS

    def of(self, kind: type[E]) -> Iterator[E]:
        """Events of one kind, in order."""
        return (e for e in self.events if isinstance(e, kind))

    def engine_events(self, *names: str) -> Iterator[ev.EngineEvent]:
        """Workers' and stages' events of these names."""
        return (e for e in self.of(ev.EngineEvent) if e.event in names)

    @property
    def phases(self) -> list[str]:
        """Phases that were started, in order."""
        return list(dict.fromkeys(e.phase for e in self.of(ev.PhaseStarted)))

    def during(self, phase: str) -> RunRecord:
        """The same run with the events of one phase only, from its start (and every resume) to the next phase's."""
        kept, now = [], ""
        for event in self.events:
            now = event.phase if isinstance(event, ev.PhaseStarted) else now
            if now == phase:
                kept.append(event)
        part = replace(self, events=kept)
        for name in ("bundles", "changed"):  # files of the whole run: what was read of them is not read again
            if name in self.__dict__:
                part.__dict__[name] = self.__dict__[name]
        return part

    @property
    def size(self) -> Topology:
        """The topology that the last phase really had."""
        return self.size_of(self.phases[-1] if self.phases else "")

    def size_of(self, phase: str) -> Topology:
        """The topology that a phase really had: its policy's, else that of the workers that it started."""
        s = self.snapshot
        if phase in self.bundles:
            return self.bundles[phase].policy.topology
        seen = [c for e in self.during(phase).of(ev.WorkerProcess) if (c := parse(e.coord)) is not None and _sane(c)]
        if not seen:
            return Topology(s.replicas, s.pipeline_stages, s.tensor)
        replicas, stages, ranks = ({getattr(c, at) for c in seen} for at in ("replica", "stage", "tensor"))
        return Topology(1 + max(replicas), 1 + max(stages), 1 + max(ranks))

    @property
    def bundles(self) -> Mapping[str, Bundle]:
        """The proof bundle of every phase that has a readable one."""
        return {phase: found for phase, found in self._bundles.items() if isinstance(found, Bundle)}

    @property
    def unread(self) -> Mapping[str, UvccError]:
        """Why a phase's proof bundle cannot be read, of every phase that has one which cannot."""
        return {phase: found for phase, found in self._bundles.items() if isinstance(found, UvccError)}

    @cached_property
    def _bundles(self) -> Mapping[str, Bundle | UvccError]:
        found: dict[str, Bundle | UvccError] = {}
        for phase in self.phases:
            path = self.artifacts / phase / NAME
            if path.is_file():
                try:
                    found[phase] = read_bundle(path, self._knows(phase))
                except (UnreadableError, VerificationError) as e:  # the verifier says why; reports go on without it
                    log.info("a bundle is left out of the reports: %s", e)
                    found[phase] = e
        return found

    def _knows(self, phase: str) -> Callable[[Policy], bool]:
        """Whether a policy is that of this run's own pods: its bundle may then be as large as it needs to be."""
        pins = self.pins(phase)
        return lambda policy: all(pins.get(f"P{p.party}") == p.public.ed25519 for p in policy.parties)

    @cached_property
    def changed(self) -> Mapping[str, tuple[str, ...]]:
        """Files that are not what they were when their phase was verified, looked at once."""
        return recheck(self.run_dir, self.snapshot)

    @property
    def pods(self) -> list[PodView]:
        """Every pod, by party and replica."""
        return sorted(self.snapshot.pods.values(), key=lambda p: (p.party, p.replica, p.pod))

    def pins(self, phase: str = "") -> dict[str, str]:
        """Identities as the parties' first pods showed them over SSH: P0.. -> OpenSSH public key line.

        The policy, which they sign, names the identities of the other replicas' pods. A party whose first pods showed
        different identities is left out: the verifier then says that it is not named. ``phase``: as they were when it
        was last started, for a pod that was replaced later had another one then.
        """
        return pins_of_identities(identities(self.events, phase))

    def signers(self, phase: str = "") -> dict[str, str]:
        """:meth:`pins`, and the pods of the other replicas as they showed themselves: ``P0``, ``P0r1``, ..."""
        shown = identities(self.events, phase)
        more = {f"P{party}r{replica}": line for party, replica, line in shown.values() if replica}
        return {**pins_of_identities(shown), **more}


def identities(events: Iterable[ev.Event], phase: str = "") -> dict[str, tuple[int, int, str]]:
    """Pod -> (party, replica, identity line) as last shown; with ``phase``, as it was when that was last started."""
    shown: dict[str, tuple[int, int, str]] = {}
    then: dict[str, tuple[int, int, str]] | None = None
    for event in events:
        if isinstance(event, ev.PodChanged | ev.PodVouched) and event.identity:
            shown[event.pod] = (event.party, event.replica, " ".join(event.identity.split()[:2]))
        elif isinstance(event, ev.PhaseStarted) and event.phase == phase:
            then = dict(shown)
    return shown if then is None else then


def pins_of_identities(shown: Mapping[str, tuple[int, int, str]]) -> dict[str, str]:
    """P0.. -> the identity of the party's first pod, where there is only one."""
    found: dict[str, set[str]] = {}
    for party, replica, line in shown.values():
        if replica == 0:
            found.setdefault(f"P{party}", set()).add(line)
    return {who: next(iter(lines)) for who, lines in found.items() if len(lines) == 1}


def _sane(c: Coord) -> bool:
    """Whether a fleet may have such a worker: reports count from its numbers."""
    return c.replica < 4096 and max(c.stage, c.tensor) < 256


def parse(text: str) -> Coord | None:
    """A coordinate, or None."""
    try:
        return Coord.parse(text)
    except ConfigError:
        return None


def address(pod: PodView) -> tuple[str, str, int]:
    """(user, host, port) of ``user@host:port``; empty where unknown."""
    user, _, rest = pod.address.rpartition("@")
    host, _, port = rest.rpartition(":")
    return user, host, int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
