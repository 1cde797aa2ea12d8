"""What the halt sidecar needs to know of a run, folded from a few kinds of events: telemetry never slows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.core.folding.state import reduce
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.haltd.halt_snapshot import KINDS as OF_HALTS
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import parse
from uvcc_engine.contract.errors import ConfigError

KINDS: Final = (*OF_HALTS, ev.Alert.kind, ev.StageChanged.kind, ev.Intent.kind, ev.ActionDone.kind)
"""Those of a halt, what an operator is notified of where nobody else could, and whether a teardown was asked for."""


class JournalView:
    """Follows a journal. ``poll`` costs one index look-up while nothing was appended."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._plan: tuple[tuple[str, str, float], dict[str, int]] = (("", "", 0.0), {})
        self.snapshot = Snapshot()

    def poll(self) -> list[ev.Event]:
        """Fold and return what is new of the kinds that matter."""
        last = self._journal.last_seq()
        seen = self.snapshot.seq
        if last <= seen:
            return []
        new: list[ev.Event] = []
        for seq, event in self._journal.since(seen, kinds=KINDS):
            self.snapshot = reduce(self.snapshot, event, seq)
            new.append(event)
            last = max(last, seq)
            if isinstance(event, ev.PhaseStarted):
                self._planned_pods(self.snapshot)
        if len(new) < 10_000:  # a full page may have left matching events behind
            self.snapshot = replace(self.snapshot, seq=last)
        return new

    def _planned_pods(self, s: Snapshot) -> dict[str, int]:
        """The plan is worked out before anybody presses a key: reading a profile takes longer than sending a halt."""
        key = (s.engine_run, s.phase, s.created)
        if self._plan[0] != key:
            self._plan = (key, _planned(s))
        return self._plan[1]

    def targets(self) -> dict[str, int]:
        """The pods that take part in the running phase and how many workers each has; before any phase, none."""
        s = self.snapshot
        if not s.engine_run:
            return {}
        found: dict[str, int] = {}
        for pod, workers in self._planned_pods(s).items():
            view = s.pods.get(pod)
            if view is not None and view.state not in (*pod_states.ABSENT, pod_states.CREATING):
                found[pod] = max(workers, sum(w.pod == pod for w in s.workers.values()))
        return found


def _planned(s: Snapshot) -> dict[str, int]:
    """Pod -> workers of the running phase, from the plan; every pod with one worker if the plan cannot be told."""
    try:
        plan = make_plan(s.run, s.profile_name, parse(dict(s.profile)))
        phase = plan.phases[s.phase]
    except (ConfigError, KeyError):
        return {name: max(1, s.pipeline_stages * s.tensor) for name in s.pods}
    return {pod: len(phase.coords(pod)) for pod in phase.pods()}
