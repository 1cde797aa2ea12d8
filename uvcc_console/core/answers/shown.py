"""The one answer to "what came of a phase": the certificate's values once it is verified, else what the pods reported.

Every surface takes a phase's result from :func:`shown` and says its mark beside it. What a pod streams can never change
what is shown of a verified phase; where it says something else, :func:`contradictions` names the pod.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from uvcc_console.core.snapshot import EMPTY, Snapshot, VerdictView

VERIFIED: Final = "verified"
CHANGED: Final = "changed"
UNCHECKED: Final = "unchecked"
REFUTED: Final = "refuted"
REPORTED: Final = "reported"
NOTHING: Final = ""
NOT_VERIFIED: Final = "reported, not verified"
Changes = Mapping[str, Sequence[str] | None]
"""By phase, the files that are not what they were when the phase was verified (``report.recheck``); None while they are
being read."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A phase's result and where it comes from.

    ``mark``: verified | changed (was verified, but files have changed since) | unchecked (the files are being read, or
    it was verified by a version that noted no checksums) | refuted | reported | "" where nothing is known. ``values``
    and ``hashes`` are the certificate's where the mark is verified or changed, else the pods' own words. ``workers``
    reported one of ``hashes``; ``at``: when it was verified.
    """

    phase: str
    mark: str = NOTHING
    values: Mapping[str, float] = field(default_factory=lambda: EMPTY)
    hashes: tuple[str, ...] = ()
    workers: int = 0
    at: float = 0.0
    global_root: str = ""
    run_root: str = ""
    sid_job: str = ""
    detail: str = ""
    changed: tuple[str, ...] = ()
    rereading: bool = False

    @property
    def verified(self) -> bool:
        return self.mark == VERIFIED

    @property
    def certified(self) -> bool:
        """Whether values and hashes are a certificate's."""
        return self.mark in (VERIFIED, CHANGED)

    def words(self, *, utc: bool = False) -> str:
        """What to say of it, in one phrase."""
        when = clock(self.at, utc=utc)
        if self.mark == VERIFIED:
            return f"verified at {when}"
        if self.mark == CHANGED:
            more = f" and {len(self.changed) - 1} more files have" if len(self.changed) > 1 else " has"
            return f"VERIFIED at {when}, but {self.changed[0]}{more} changed since: not verified now"
        if self.mark == UNCHECKED and self.rereading:
            return f"verified at {when}, its files are being read again"
        if self.mark == UNCHECKED:
            return f"verified at {when} by a version that noted no checksums; uvcc verify checks it now"
        if self.mark == REFUTED:
            return f"NOT VERIFIED: {self.detail}"
        return NOT_VERIFIED if self.mark == REPORTED else "nothing reported yet"

    def figures(self) -> str:
        """``accuracy 0.9611, loss 0.0423``, marked unless verified."""
        text = ", ".join(f"{k} {v:.4f}" for k, v in self.values.items())
        return text if self.verified or not text else f"{text} ({self.caveat})"

    @property
    def caveat(self) -> str:
        """The mark of values that are not verified now; empty if they are."""
        return {VERIFIED: "", CHANGED: "changed since it was verified"}.get(self.mark, NOT_VERIFIED)


def clock(ts: float, *, utc: bool = False) -> str:
    """A time of day as hour and minute."""
    return time.strftime("%H:%M", time.gmtime(ts) if utc else time.localtime(ts))


def shown(s: Snapshot, phase: str, changed: Changes = EMPTY) -> Shown:
    """The result of a phase as it is to be shown. Pure; ``changed`` is what a recheck of the files has found."""
    verdict = s.verdicts.get(phase)
    differ = changed.get(phase, ())
    mark = _mark(verdict, differ)
    if verdict is not None and mark in (VERIFIED, CHANGED):
        values, hashes = verdict.values, verdict.result_hashes
    else:
        values = s.results.get(phase, EMPTY)
        hashes = tuple(sorted({h for key, h in s.result_hashes.items() if key.startswith(f"{phase}/")}))
        mark = mark or (REPORTED if values or hashes else NOTHING)
    said = sum(key.startswith(f"{phase}/") and h in hashes for key, h in s.result_hashes.items())
    found = Shown(phase, mark, values, hashes, said)
    if verdict is None:
        return found
    return Shown(
        phase,
        mark,
        values,
        hashes,
        said,
        verdict.ts,
        verdict.global_root,
        verdict.run_root,
        verdict.sid_job,
        verdict.detail,
        tuple(differ or ()),
        differ is None,
    )


def _mark(verdict: VerdictView | None, changed: Sequence[str] | None) -> str:
    if verdict is None:
        return NOTHING
    if not verdict.ok:
        return REFUTED
    if not verdict.result_hashes or not verdict.files or changed is None:
        return UNCHECKED
    return CHANGED if changed else VERIFIED


def final(s: Snapshot, changed: Changes = EMPTY) -> Shown:
    """The result that sums the run up: the full run's, else that of the phase that was verified or reported last."""
    phases = [*s.results, *s.verdicts]
    return shown(s, "full" if "full" in phases or not phases else phases[-1], changed)


def verified(s: Snapshot, changed: Changes = EMPTY) -> bool | None:
    """Whether every phase that was checked holds now, the full run among them; None while that is open."""
    marks = {phase: shown(s, phase, changed).mark for phase in s.verdicts}
    if {REFUTED, CHANGED} & set(marks.values()):
        return False
    if "full" not in marks or UNCHECKED in marks.values():
        return None
    return True


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A pod said something else of a phase's result than what its certificate says."""

    pod: str
    coord: str
    phase: str
    text: str


def contradictions(s: Snapshot) -> list[Contradiction]:
    """Every report that is not what was verified, in the order in which they came."""
    found = []
    for report in s.reports.values():
        verdict = s.verdicts.get(report.phase)
        if verdict is None or not verdict.ok or not verdict.result_hashes:
            continue
        wrong = [
            f"{k} {v:g} where the certificate says {_said(verdict.values.get(k))}"
            for k, v in report.values.items()
            if verdict.values.get(k) != v
        ]
        if report.result_hash not in verdict.result_hashes:
            wrong.append(
                f"result hash {report.result_hash[:12] or 'none'}, verified is {verdict.result_hashes[0][:12]}"
            )
        if wrong:
            text = f"pod {report.pod or '?'} reported of {report.coord} in {report.phase}: {'; '.join(wrong)}"
            found.append(Contradiction(report.pod, report.coord, report.phase, text))
    return found


def _said(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"
