"""Drives a halt ladder over the pods' agent channels: its sends become commands, the agents' words its evidence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, Protocol

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.core.supervision import SideTasks
from uvcc_console.halt import machine
from uvcc_console.halt.machine import PodEvidence
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.agent_protocol.agent_commands import Command, HaltCommand, SignalCommand
from uvcc_engine.contract.agent_protocol.agent_messages import Ack, AgentMessage, HaltStage
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.run_files import control
from uvcc_engine.contract.run_files.records import Malformed

log = logger(__name__)
_SIGNALS: Final[dict[str, Literal["TERM", "KILL"]]] = {machine.TERM: "TERM", machine.KILL: "KILL"}


class Channel(Protocol):
    """What the ladder needs of an AgentClient."""

    @property
    def up(self) -> bool: ...

    def post(self, command: Command, *, nonce: str) -> asyncio.Future[Ack] | None: ...


class Halter:
    """At most one ladder at a time; a further request under a new nonce takes over and never weakens the old one.

    ``append`` writes events durably; ``terminate(pod)`` ends a pod at its provider and returns when it is proven gone.
    ``certify(done, engine_run, evidence)`` writes the certificate of a verified halt and returns its hash.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        append: Callable[[list[ev.Event]], None],
        *,
        auto: Collection[str] = (machine.HOLD, machine.HALT, machine.TERM),
        times: machine.Times | None = None,
        terminate: Callable[[str], Any] | None = None,
        certify: Callable[[ev.HaltDone, str, Mapping[str, PodEvidence]], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ladder: machine.Ladder | None = None
        self._channels = channels
        self._append = append
        self.auto = auto
        self.checkpoints = True
        self.votes = False
        self.times = times
        self._terminate = terminate
        self._certify = certify
        self._clock = clock
        self._run = ""
        self._asked = ev.HaltRequested(nonce="", mode="", by="")
        self._nonces: set[str] = set()  # of those whom this ladder took over from: they may still steer it
        self._overtaken: dict[str, bool] = {}  # nonce -> whether it only drilled: who waits for a verdict of what ended
        self._beside = SideTasks(None, lambda event: append([event]))
        self._ending: dict[str, asyncio.Task[None]] = {}

    @property
    def active(self) -> bool:
        """Whether a ladder still climbs."""
        return self.ladder is not None and not self.ladder.done

    def request(self, asked: ev.HaltRequested, run: str, pods: Mapping[str, int]) -> None:
        """Obey a request from the journal about engine run ``run``; ``pods`` maps its pods to their workers."""
        now = self._clock()
        before = self.ladder
        if before is not None and (asked.nonce == before.nonce or (asked.nonce in self._nonces and self.active)):
            self._act(before.request(asked.mode, now))
            return
        committed = before is not None and self.active and before.rung not in (machine.HOLD, machine.RELEASE)
        held = before is not None and self.active and before.rung == machine.HOLD and not before.drill
        if before is None or not self.active:
            self._nonces.clear()
            self._overtaken.clear()
        elif committed or held:
            self._nonces.add(before.nonce)
        else:  # a drill, or what is just being released: nothing of it is in force any more, but somebody waits for it
            self._overtaken |= dict.fromkeys(self._nonces, False) | {before.nonce: before.drill}
            self._nonces.clear()
        mode = machine.HALT if committed else asked.mode
        drill = asked.drill and not committed and not held  # whoever held it wants a halt, unless he releases it
        self._asked = replace(asked, mode=mode, drill=drill, ts=0.0)
        self._act(self._ladder(run, pods).start(self._asked.mode, self._clock()))
        if (asked.drill, asked.mode) != (drill, mode):  # a conductor that reads of a hold takes its end for no halt
            self._append([replace(self._asked, reason="it joins a hold or halt under way")])

    def _ladder(self, run: str, pods: Mapping[str, int]) -> machine.Ladder:
        """The ladder of what was asked for over the workers of ``run``; it takes the place of the one before."""
        now = self._clock()
        self._run = run
        ladder = machine.Ladder(
            self._asked.nonce,
            pods,
            drill=self._asked.drill,
            auto=self.auto,
            times=self.times,
            checkpoints=self.checkpoints,
            votes=self.votes,
        )
        self.ladder = ladder
        for pod in pods:
            channel = self._channels.get(pod)
            if channel is None or not channel.up:
                ladder.link(pod, False, now)
        return ladder

    async def close(self) -> None:
        """Nothing is journalled after this: a termination under way is left to whoever looks at the run next."""
        tasks = list(self._ending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def renew(self, run: str, pods: Mapping[str, int]) -> None:
        """Workers were started again. A halt that had its verdict is over: nothing of it may reach the new ones.

        One that has none yet was asked for by somebody who still waits: it holds for the new workers.
        """
        before, unfinished = self.ladder, self.active
        self.ladder = None
        if before is None or not unfinished:
            self._nonces.clear()
            self._overtaken.clear()
            return
        rung = before.rung if before.rung in (machine.HOLD, machine.RELEASE) else machine.HALT
        why = "it had no verdict yet when workers were started"
        self._asked = replace(self._asked, mode=machine.HOLD if before.drill else rung, reason=why)
        ladder, now = self._ladder(run, pods), self._clock()
        self._act(ladder.void(now) if self._asked.mode == machine.RELEASE else ladder.start(self._asked.mode, now))
        self._append([self._asked])

    def message(self, pod: str, told: AgentMessage | Malformed) -> None:
        """Something an agent said by itself."""
        if self.ladder is None or not isinstance(told, HaltStage) or not self._concerns(told):
            return
        self._act(
            self.ladder.report(
                pod,
                told.stage,
                self._clock(),
                coord=told.coord,
                step=told.step,
                checkpoint=told.checkpoint,
                detail=told.detail,
                lacks=told.lacks,
            )
        )

    def _concerns(self, told: HaltStage) -> bool:
        """Evidence for this nonce; or of a halt that an earlier, superseded nonce brought about."""
        assert self.ladder is not None
        superseded = told.nonce in self._nonces and told.stage in ("halted", "gone")
        return told.run == self._run and (told.nonce == self.ladder.nonce or superseded)

    def witnessed(self, pod: str, coord: str, stage: str, step: int, checkpoint: str) -> None:
        """A worker's signed word, read at the relay."""
        if self.ladder is not None:
            now = self._clock()
            said = self.ladder.report(pod, stage, now, coord=coord, step=step, checkpoint=checkpoint, path="relay")
            self._act(said)

    def link(self, pod: str, up: bool) -> None:
        """A channel went down or came up."""
        if self.ladder is not None:
            self._act(self.ladder.link(pod, up, self._clock()))

    def tick(self) -> None:
        """Call often: it is the ladder's clock."""
        if self.ladder is not None:
            self._act(self.ladder.tick(self._clock()))

    def _act(self, actions: list[machine.LadderAction]) -> None:
        """Commands first, then the disk, whatever order they came in."""
        for action in actions:
            if isinstance(action, machine.Send):
                self._send(action)
        records = [self._certified(a.event) for a in actions if isinstance(a, machine.Journalled)]
        for done in [r for r in records if isinstance(r, ev.HaltDone)]:
            records += self._for_others(done)
        if records:
            self._append(records)

    def _for_others(self, done: ev.HaltDone) -> list[ev.HaltDone]:
        """The verdict for those who asked before: without one they would wait for what nobody is at any more.

        Who released a hold hears of a drill that came in between as what it did for him: it released his pods.
        """
        told = [replace(done, nonce=nonce, certificate="") for nonce in sorted(self._nonces)]
        for nonce, drilled in sorted(self._overtaken.items()):
            freed = done.drill and not drilled
            again = replace(done, mode=machine.RELEASE, drill=False) if freed else done
            told.append(replace(again, nonce=nonce, certificate=""))
        self._overtaken.clear()
        return told

    def _certified(self, event: ev.Event) -> ev.Event:
        """A verdict that every pod of a real halt is verified names its certificate."""
        if not isinstance(event, ev.HaltDone) or self._certify is None or self.ladder is None:
            return event
        if event.drill or event.mode != machine.HALT or not 0 < event.total == event.verified:
            return event
        try:
            return replace(event, certificate=self._certify(event, self._run, self.ladder.evidence()))
        except UvccError as e:
            log.error("no certificate of it: %s", e, nonce=event.nonce)  # the verdict itself must not wait for it
            return event

    def _send(self, send: machine.Send) -> None:
        assert self.ladder is not None
        if send.rung == machine.TERMINATE:
            self._terminate_pod(send.pod)
            return
        channel = self._channels.get(send.pod)
        if channel is None:
            return
        nonce = self.ladder.nonce
        if send.rung in _SIGNALS:
            answer = channel.post(
                SignalCommand(run=self._run, signal=_SIGNALS[send.rung]), nonce=f"{nonce}.{send.rung}"
            )
        else:
            mode = control.checked_mode(send.rung)
            answer = channel.post(HaltCommand(run=self._run, mode=mode, deadline_s=send.deadline_s), nonce=nonce)
        if answer is not None:
            answer.add_done_callback(partial(self._answered, send.pod, send.rung, nonce))

    def _answered(self, pod: str, rung: str, nonce: str, answer: asyncio.Future[Ack]) -> None:
        if answer.cancelled() or answer.exception() is not None or self.ladder is None or self.ladder.nonce != nonce:
            return
        ack, now = answer.result(), self._clock()
        log.info("%s is %s", rung, "taken" if ack.ok else "refused", pod=pod, nonce=nonce)
        if ack.ok:
            self._act(self.ladder.acked(pod, rung, now))
        else:
            self._act(self.ladder.refused(pod, rung, now, ack.code, ack.error))

    def _terminate_pod(self, pod: str) -> None:
        """The ladder asks again until it is proven gone; one deletion a pod is under way at a time."""
        if self._terminate is None or self.ladder is None or pod in self._ending:
            return
        nonce = self.ladder.nonce

        async def end() -> None:
            assert self._terminate is not None
            try:
                await self._terminate(pod)
            except UvccError as e:
                log.error("it could not be terminated: %s", e, pod=pod, nonce=nonce)
                return
            if self.ladder is not None and self.ladder.nonce == nonce:
                lacks, at = wire.Lacks.NO_EXIT, self._clock()
                self._act(self.ladder.report(pod, "gone", at, path="api", detail="the pod is gone", lacks=lacks))

        task = self._beside.start(f"the termination of {pod}", end)
        self._ending[pod] = task
        task.add_done_callback(lambda _: self._ending.pop(pod, None))
