"""From one agent's channel into the journal: what arrives within a moment becomes one batch with its cursors."""

from __future__ import annotations

from uvcc_console.core import events as ev
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member
from uvcc_console.rollout.intake import Intake
from uvcc_console.rollout.plan import Phase
from uvcc_engine.contract import wire


async def run(bus: Bus, member: Member) -> None:
    """Translate messages until the channel is closed. Events and the cursor they lead to are queued together."""
    async for message in member.channel.messages():
        if message.get("op") == wire.TELEMETRY:  # of the pod, whatever runs on it
            intake = next(iter(member.intakes.values()), None)
        else:
            intake = member.intakes.get(str(message.get("run", "")))
        if intake is None:
            continue
        before = dict(intake.cursors)
        found = intake.events(message)
        moved = {key: at for key, at in intake.cursors.items() if before.get(key) != at}
        if moved:
            found.append(ev.CursorMoved(pod=member.name, cursors=moved))
        bus.record(found)


def listen_for(member: Member, phase: Phase) -> Intake:
    """Have the engine run of a phase translated from now on."""
    intake = member.intakes.get(phase.engine_run)
    if intake is None:
        coords = [str(c) for c in phase.coords(member.name)]
        intake = member.intakes[phase.engine_run] = Intake(member.name, phase.engine_run, phase.name, coords[0])
    return intake
