"""From one agent's channel into the journal: what arrives within a moment becomes one batch with its cursors."""

from __future__ import annotations

import asyncio
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.core.supervision import SideTasks
from uvcc_console.plan.plan import Phase
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member
from uvcc_console.rollout.decoder import Decoder
from uvcc_engine.contract.agent_protocol.agent_messages import Ack, AgentMessage, Telemetry, Unknown
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.contract.text import clean

log = logger(__name__)
TELL_S: Final = 1.0
SAMPLE_S: Final = 10.0
AGAIN_S: Final = 60.0


BLIND: Final = "if it comes again, nothing of this pod is journalled: F9 halts it all the same; then tear it down"


def start(beside: SideTasks, bus: Bus, member: Member) -> asyncio.Task[None]:
    """Keep ``run`` going beside the stages: while the channel is open, nothing but ``cancel`` should end it."""
    return beside.start(f"the ingest of {member.name}", lambda: run(bus, member), hint=BLIND)


async def run(bus: Bus, member: Member) -> None:
    """Translate messages until the channel is closed. Events and the cursor they lead to are queued together.

    A message that cannot be translated is counted and told; the next one is translated.
    """
    tally = Tally(bus, member.name)
    try:
        async for message in member.channel.messages():
            try:
                found = _translated(member, message)
            except Exception as e:  # noqa: BLE001  (no message of a pod may end the pod's stream; it is told by name)
                tally.failed(message, e)
            else:
                bus.record(tally.taken(found))
                await bus.room()
    finally:
        tally.close()


def _translated(member: Member, message: AgentMessage | Malformed) -> list[ev.Event]:
    if isinstance(message, Malformed):
        return [ev.LinesMalformed(where=member.name, count=message.n, src="agent", sample=message.why)]
    if isinstance(message, Ack | Unknown):
        return []
    if isinstance(message, Telemetry):  # of the pod, whatever runs on it
        decoder = next(iter(member.decoders.values()), None)
    else:
        decoder = member.decoders.get(message.run)
    if decoder is None:
        return []
    before = dict(decoder.cursors)
    found = decoder.events(message)
    moved = {key: at for key, at in decoder.cursors.items() if before.get(key) != at}
    return [*found, ev.CursorMoved(pod=member.name, cursors=moved)] if moved else found


class Tally:
    """Sums up what a pod could write without end: malformed lines, at most one event a second, a sample now and then.

    An error in this program, met in a message, is an alert of its own, at most once a minute.
    """

    def __init__(self, bus: Bus, pod: str) -> None:
        self._bus = bus
        self._pod = pod
        self._loop = asyncio.get_running_loop()
        self._counts: dict[str, int] = {}
        self._sample: tuple[str, str] | None = None
        self._told = self._sampled = self._alerted = float("-inf")
        self._later: asyncio.TimerHandle | None = None

    def taken(self, found: list[ev.Event]) -> list[ev.Event]:
        """``found`` with its malformed lines kept back until they are due."""
        rest = []
        for event in found:
            if isinstance(event, ev.LinesMalformed):
                self._count(event.src, event.count, event.sample)
            else:
                rest.append(event)
        return rest

    def failed(self, message: AgentMessage | Malformed, error: Exception) -> None:
        """A message that the translation itself could not take."""
        op = type(message).__name__
        self._count(op, 1, f"{type(error).__name__}: {error}"[:500])
        if self._loop.time() - self._alerted >= AGAIN_S:
            self._alerted = self._loop.time()
            log.error("a message (%s) could not be read", op, pod=self._pod, exc_info=error)
            text = f"a message ({op}) could not be read: {clean(f'{type(error).__name__}: {error}', 200)}"
            hint = "the rest of its stream goes on; uvcc logs has the details"
            self._bus.record([ev.Alert(level="error", name="ingest", text=text, hint=hint, subject=self._pod)])

    def _count(self, src: str, n: int, sample: str) -> None:
        key = src if src in self._counts or len(self._counts) < 16 else "others"
        self._counts[key] = self._counts.get(key, 0) + n
        if sample and self._sample is None and self._loop.time() - self._sampled >= SAMPLE_S:
            self._sample = (key, clean(sample, 200))
        wait = self._told + TELL_S - self._loop.time()
        if wait <= 0:
            self._flush()
        elif self._later is None:
            self._later = self._loop.call_later(wait, self._flush)

    def _flush(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if not self._counts:
            return
        now = self._loop.time()
        src, sample = self._sample or ("", "")
        if sample:
            self._sampled = now
        total = sum(self._counts.values())
        src = src or ", ".join(sorted(self._counts))[:100]
        self._counts, self._sample, self._told = {}, None, now
        self._bus.record([ev.LinesMalformed(where=self._pod, count=total, src=src, sample=sample)])

    def close(self) -> None:
        """Report what the event limiter still keeps back."""
        self._flush()


def listen_for(member: Member, phase: Phase) -> Decoder:
    """Have the engine run of a phase translated from now on."""
    decoder = member.decoders.get(phase.engine_run)
    if decoder is None:
        coords = [str(c) for c in phase.coords(member.name)]
        decoder = member.decoders[phase.engine_run] = Decoder(
            member.name, phase.engine_run, phase.name, coords[0], coords=coords, steps=phase.steps
        )
    return decoder
