"""The halt ladder: hold -> halt -> TERM -> KILL -> terminate, as a state machine without clock, network or disk.

Whoever drives it says what happened (``start``, ``request``, ``report``, ``acked``, ``link``, ``tick``) with the time
on a monotonic clock, and carries out the actions that come back: ``Send`` first, then ``Journalled``. Nothing counts as
verified without evidence from the pod; a pod that gives none by its rung's deadline is ``unknown``, and stays so
until it speaks. A worker that is gone without a verified checkpoint has stopped but is not verified, and never will be:
the ladder does not wait for it. Commands are sent again, under the same nonce, until acknowledged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from uvcc_console.core import events as ev
from uvcc_console.halt.ladder_types import (
    AFTER,
    EVIDENCE_RANK,
    EXCUSED,
    HALT,
    HOLD,
    KILL,
    NOTHING,
    RELEASE,
    RUNG_RANK,
    TERM,
    TERMINATE,
    Journalled,
    LadderAction,
    PodEvidence,
    PodState,
    Send,
    Times,
)
from uvcc_engine.contract.agent_protocol.wire import AckCode, Lacks

__all__ = [
    "HALT",
    "HOLD",
    "KILL",
    "RELEASE",
    "TERM",
    "TERMINATE",
    "Journalled",
    "Ladder",
    "LadderAction",
    "PodEvidence",
    "Send",
    "Times",
]


class Ladder:
    """One halt, by its nonce. ``pods`` maps each pod to its number of workers; ``auto`` lists the armed rungs.

    ``checkpoints``: whether a stopped worker must have left one. ``votes``: whether the workers agree by a vote at
    which step to stop, so that one which stopped speaks for its peers (told, never counted as verified). ``done`` turns
    true with the first HaltDone of the final rung. Later evidence from unknown pods is still taken. TERM and KILL go
    only to pods whose agent has acknowledged the halt and had its time for it: a pod that was out of reach is asked to
    halt first when it is back.
    """

    def __init__(
        self,
        nonce: str,
        pods: Mapping[str, int],
        *,
        drill: bool = False,
        auto: Collection[str] = (HOLD, HALT, TERM),
        times: Times | None = None,
        by: str = "haltd",
        checkpoints: bool = True,
        votes: bool = False,
    ) -> None:
        self._checkpoints = checkpoints
        self._votes = votes
        self._typed = False
        self.nonce = nonce
        self.drill = drill
        self.rung = ""
        self.done = False
        self._by = by
        self._auto = frozenset(auto)
        self._times = times or Times()
        self._pods = {name: PodState(max(1, workers)) for name, workers in pods.items()}
        self._began = 0.0
        self._entered = 0.0
        self._verified_before = -1

    def evidence(self) -> dict[str, PodEvidence]:
        """What every pod has shown so far, for the certificate."""
        return {
            name: PodEvidence(p.stage, p.stage == "gone", dict(p.steps), {c: h for c, h in p.checkpoints.items() if h})
            for name, p in self._pods.items()
        }

    # what happens

    def start(self, mode: str, now: float) -> list[LadderAction]:
        """The request itself.

        A release or a typed rung comes first where whoever held or halted has died: maybe nothing of it was ever sent.
        A release is answered by workers that are not held as well, at the end of their step.
        """
        self._began = now
        if mode == RELEASE:
            self._times = replace(self._times, release=max(self._times.release, self._times.hold))
            return self._enter(RELEASE, now)
        first = self._enter(HOLD if mode == HOLD else HALT, now)
        return first if mode in (HOLD, HALT) or self.done else first + self.request(mode, now)

    def void(self, now: float) -> list[LadderAction]:
        """A release whose held workers are no more: it ends at once."""
        self._began = now
        return self._finish(RELEASE, now)

    def request(self, mode: str, now: float) -> list[LadderAction]:
        """A further request under the same nonce: commit, release, or a rung that somebody typed the run id for."""
        if mode == RELEASE:
            if self.rung == HOLD:
                return self._too_late(now) or self._enter(RELEASE, now)
            if self.rung in (HALT, TERM, KILL, TERMINATE):
                return [self._alert("warn", "halt_release_late", "the halt is committed; a release comes too late")]
            return []
        if mode == HALT and self.rung in (HOLD, RELEASE):
            return [] if self.done else self._enter(HALT, now)
        if mode in (TERM, KILL, TERMINATE) and RUNG_RANK[mode] > RUNG_RANK.get(self.rung, 0):
            self.done = False
            self._typed = True
            return self._enter(mode, now)
        return []

    def acked(self, pod: str, rung: str, now: float) -> list[LadderAction]:
        """The agent acknowledged the command of ``rung``."""
        p = self._pods.get(pod)
        if p is None or rung not in (self.rung, HALT):
            return []
        p.acked = rung
        if rung == HALT:
            p.halting_since = min(p.halting_since, now)
        p.unknown = False
        return self.report(pod, "seen", now) if EVIDENCE_RANK[p.stage] < EVIDENCE_RANK["seen"] else []

    def refused(self, pod: str, rung: str, now: float, code: AckCode, why: str) -> list[LadderAction]:
        """The agent would not do it. A pod on which no worker of the run was ever started has nothing to halt, and
        nothing to release.
        """
        p = self._pods.get(pod)
        if p is None or rung != self.rung or self._satisfied(p):
            return []
        if code == AckCode.NO_WORKER and rung != HOLD:
            p.acked = rung
            return self.report(pod, "released" if rung == RELEASE else "gone", now, detail=NOTHING)
        return self._mark_unknown(pod, why)

    def report(
        self,
        pod: str,
        stage: str,
        now: float,
        *,
        coord: str = "",
        step: int = -1,
        checkpoint: str = "",
        path: str = "ssh",
        detail: str = "",
        lacks: Lacks | None = Lacks.NOTHING,
    ) -> list[LadderAction]:
        """Evidence from a pod or from one of its workers; ``lacks`` None: it does not say what is missing."""
        p = self._pods.get(pod)
        if p is None or (stage not in EVIDENCE_RANK and stage != "released"):
            return []
        if step >= 0 and stage != "released":  # who was released has gone on, each as far as it came
            p.steps[coord] = step
        if checkpoint:
            p.checkpoints[coord] = checkpoint
        if stage == "gone" and self._checkpoints and not checkpoint and lacks not in EXCUSED:
            p.unproven[coord] = detail or "it does not say why it names no checkpoint"
        p.unknown = False
        if stage == "released":
            if self.rung == RELEASE:
                p.released_by.add(coord)
            said = "released" if p.released else p.recorded
        else:
            said = p.learn(stage, coord)
        out: list[LadderAction] = []
        if said and said != p.recorded:
            p.recorded = said
            out.append(Journalled(self._ack(pod, said, detail, path)))
        return out + self._vouch() + self._advance(now)

    def _vouch(self) -> list[LadderAction]:
        """What the stopped workers' words mean for a pod out of reach: they stopped by its vote too."""
        if not self._votes or self.rung in (HOLD, RELEASE):
            return []
        stopped = {n: p for n, p in self._pods.items() if p.stage == "halted" or (p.verified and p.checkpoint)}
        steps = {p.step for p in stopped.values()}
        out: list[LadderAction] = []
        for name, p in self._pods.items():
            if name in stopped or not p.unknown or len(steps) != 1 or p.vouched in steps:
                continue
            p.vouched = min(steps)
            text = f"out of reach; by its vote {', '.join(sorted(stopped))} stopped at step {p.vouched}"
            ack = ev.HaltAck(pod=name, nonce=self.nonce, stage="unknown", step=p.vouched, detail=text, path="peer")
            out += [Journalled(ev.LinkChanged(pod=name, path="peer", up=True, detail=text)), Journalled(ack)]
        return out

    def link(self, pod: str, up: bool, now: float) -> list[LadderAction]:
        """The path to a pod went down or came back."""
        p = self._pods.get(pod)
        if p is None or p.up == up:
            return []
        p.up = up
        if not self.rung or self._satisfied(p):
            return []
        if up:
            p.sent_at = float("-inf")
            return self._resend(now)
        return self._mark_unknown(pod, "its link is down")

    def tick(self, now: float) -> list[LadderAction]:
        """Time passed: send again, commit, give up on a rung."""
        if not self.rung:
            return []
        waited = now - self._entered
        if self.rung == HOLD and not self.drill and not self.done and waited >= self._times.commit:
            return self._commit(now, "the hold was not released")
        if not self.done and waited >= self._times.of(self.rung, self.drill):
            return self._overdue(now)
        return self._resend(now)

    # rungs

    def _enter(self, rung: str, now: float) -> list[LadderAction]:
        self.rung, self._entered = rung, now
        out: list[LadderAction] = []
        for p in self._pods.values():
            p.sent_at = float("-inf")
            p.acked = ""
            p.released_by.clear()
        out += self._resend(now)
        for name, p in self._pods.items():
            if not p.up and not self._satisfied(p):
                out += self._mark_unknown(name, "its link is down")
        return out + self._advance(now)

    def _resend(self, now: float) -> list[LadderAction]:
        """The rung's command to every pod that neither acknowledged it nor shows its effect; sends come first."""
        again = self._times.resend if not self.done else self._times.resend_late
        sends: list[LadderAction] = []
        records: list[LadderAction] = []
        for name, p in self._pods.items():
            rung = self._command(p, now)
            if p.acked == rung or self._satisfied(p) or p.hopeless or now - p.sent_at < again:
                continue
            if not p.up and rung != TERMINATE:  # a termination goes to the provider, not over the pod's link
                continue
            p.sent_at = now
            sends.append(Send(name, rung, self.hold_deadline()))
            if not p.recorded:
                p.recorded = p.stage = "sent"
                records.append(Journalled(self._ack(name, "sent")))
        return sends + records

    def _command(self, p: PodState, now: float) -> str:
        """What this pod is to be told on this rung."""
        if self.rung in (TERM, KILL) and not self._typed and now - p.halting_since < self._times.halt:
            return HALT
        return self.rung

    def hold_deadline(self) -> float:
        """After this a held worker halts by itself: the console may have died. A drill leaves room to release."""
        t = self._times
        if self.rung != HOLD:
            return 0.0
        return t.drill + 2 * t.release if self.drill else t.commit + 2.0

    def _satisfied(self, p: PodState) -> bool:
        if self.rung == HOLD:
            return EVIDENCE_RANK[p.stage] >= EVIDENCE_RANK["held"]
        if self.rung == RELEASE:
            return p.released or p.stage == "gone"
        return p.verified

    def _advance(self, now: float) -> list[LadderAction]:
        """Go on when every pod has shown what this rung asks for, or cannot show it any more."""
        pods = self._pods.values()
        if self.rung == RELEASE and not self.done and (late := self._too_late(now)):
            return late
        if not self.rung or not all(self._satisfied(p) or p.hopeless for p in pods):
            return []
        if self.rung == HOLD:
            return self._enter(RELEASE, now) if self.drill and not self.done else []
        if self.done and sum(self._verified(p) for p in pods) == self._verified_before:
            return []
        return self._finish(self.rung, now)

    def _commit(self, now: float, why: str) -> list[LadderAction]:
        asked = ev.HaltRequested(nonce=self.nonce, mode=HALT, by=self._by, reason=why)
        sends = self._enter(HALT, now)
        return [
            *(a for a in sends if isinstance(a, Send)),
            Journalled(asked),
            *(a for a in sends if isinstance(a, Journalled)),
        ]

    def _too_late(self, now: float) -> list[LadderAction]:
        """A hold that has become a halt on one pod is not released on the others."""
        halted = [name for name, p in self._pods.items() if p.halted]
        if not halted or self.drill:
            return []
        return self._commit(now, f"{', '.join(halted)} had halted before the release came")

    def _overdue(self, now: float) -> list[LadderAction]:
        """The rung's time is over: what did not answer is unknown, and the next armed rung is tried."""
        late = [name for name, p in self._pods.items() if not self._satisfied(p)]
        out: list[LadderAction] = []
        for name in late:
            out += self._mark_unknown(
                name, f"no evidence of {self.rung} in {self._times.of(self.rung, self.drill):g} s"
            )
        if self.rung == HOLD:
            return out + self._enter(RELEASE, now)  # only a drill waits for its hold; it never turns into a halt
        if self.rung == RELEASE and not self.drill:
            return out + self._commit(now, f"{', '.join(late)} did not acknowledge the release")
        following = AFTER.get(self.rung, "")
        if following and following in self._auto:
            return out + self._enter(following, now)
        return out + self._finish(self.rung, now)

    def _verified(self, p: PodState) -> bool:
        """Whether this pod's evidence answers the request as it was made."""
        if self.rung == RELEASE:
            return self._satisfied(p) and (not self.drill or p.was_held)
        return self._satisfied(p)

    def _finish(self, rung: str, now: float) -> list[LadderAction]:
        self.done = True
        self.rung = rung
        verified = [name for name, p in self._pods.items() if self._verified(p)]
        self._verified_before = len(verified)
        steps = {p.step for p in self._pods.values() if p.step >= 0}
        mode = HOLD if self.drill else RELEASE if rung == RELEASE else HALT
        out: list[LadderAction] = []
        if len(steps) > 1:
            where = ", ".join(f"{n} at {p.step}" for n, p in sorted(self._pods.items()) if p.step >= 0)
            out.append(self._alert("error", "halt_step_mismatch", f"the pods stopped at different steps: {where}"))
        lost = [f"{n} ({'; '.join(p.unproven.values())})" for n, p in sorted(self._pods.items()) if p.hopeless]
        if lost:
            text = f"stopped without a verified checkpoint: {', '.join(lost)}"
            out.append(self._alert("error", "halt_no_checkpoint", text, "resume goes back to the last common one"))
        stuck = [n for n, p in sorted(self._pods.items()) if self.drill and not self._satisfied(p)]
        if stuck:
            text = f"the drill was not released on {', '.join(stuck)}"
            out.append(
                self._alert("error", "drill_not_released", text, "these pods halt by themselves at the deadline")
            )
        done = ev.HaltDone(
            nonce=self.nonce,
            mode=mode,
            verified=len(verified),
            total=len(self._pods),
            step=min(steps, default=-1),
            seconds=now - self._began,
            drill=self.drill,
        )
        return [*out, Journalled(done)]

    # events

    def _ack(self, pod: str, stage: str, detail: str = "", path: str = "ssh") -> ev.HaltAck:
        p = self._pods[pod]
        return ev.HaltAck(
            pod=pod, nonce=self.nonce, stage=stage, step=p.step, checkpoint=p.checkpoint, detail=detail, path=path
        )

    def _mark_unknown(self, pod: str, why: str) -> list[LadderAction]:
        p = self._pods[pod]
        if p.unknown or p.stage == "gone":
            return []  # the link to a pod whose end is proven goes down with it
        p.unknown = True
        p.recorded = "unknown"
        return [Journalled(self._ack(pod, "unknown", why)), *self._vouch()]

    def _alert(self, level: str, name: str, text: str, hint: str = "") -> Journalled:
        return Journalled(ev.Alert(level=level, name=name, text=text, hint=hint, subject="halt"))
