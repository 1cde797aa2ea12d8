"""The action ``flight``: ask every worker's flight recorder, bring the answers home, say who is behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Sequence
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.answers import flight
from uvcc_console.fleet import agent_lines
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.plan.plan import Phase
from uvcc_console.rollout.context import Member, Rollout, each
from uvcc_engine.contract.agent_protocol.agent_commands import FlightCommand
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.untrusted import as_object
from uvcc_engine.contract.run_files.flight import name_of
from uvcc_engine.contract.text import counted

ANSWER_S: Final = 10.0
LOOK_S: Final = 0.3
LONGEST: Final = 16 << 20
Answer = dict[str, Any]


async def read(ctx: Rollout, phase: Phase) -> str:
    """Read all workers of a phase; the reading is journalled and kept. Raises UvccError if nobody answers."""
    nonce = secrets.token_hex(8)

    async def one(member: Member) -> tuple[list[str], dict[str, Answer]]:
        ack = await member.channel.request(FlightCommand(run=phase.engine_run), nonce=nonce)
        asked = agent_lines.own(ack.get("asked", []), lambda c: _hosted(phase, member.name, c), member.name)
        return asked, await _answers(member, phase.engine_run, asked, nonce)

    found = await each(ctx.of_phase(phase), one)
    asked = [c for coords, _ in found.values() for c in coords]
    answers = {c: a for _, some in found.values() for c, a in some.items()}
    if not asked:
        raise UvccError(f"no worker of {phase.engine_run} lives", "its last collectives are in the log")
    if not answers:
        raise UvccError(f"no flight recorder answered in {ANSWER_S:g} s", "D has the pod's workers write their stacks")
    home = ctx.artifacts / "flight" / f"{phase.name}-{nonce}"
    with DownloadFolder(home) as downloads:
        for coord, answer in answers.items():
            downloads.write((name_of(coord),), json.dumps(answer, indent=1).encode())
    findings = flight.diagnose(answers)
    silent = sorted(set(asked) - set(answers))
    where = str(home.relative_to(ctx.run_dir))
    told = {coord: flight.newest(answer) for coord, answer in sorted(answers.items())}
    ctx.say(ev.FlightRead(folder=where, newest=told, silent=silent, findings=findings))
    differs = "; ".join(findings) or "nothing differs"
    return f"{len(answers)} of {counted(len(asked), 'worker')} answered: {differs}; {where}"


def _hosted(phase: Phase, pod: str, coord: str) -> bool:
    """Whether a worker of this name would be that pod's: its answer becomes a file of this name."""
    try:
        found = Coord.parse(coord)
    except ConfigError:
        return False
    return str(found) == coord and phase.pod_of(found) == pod


async def _answers(member: Member, run: str, coords: Sequence[str], nonce: str) -> dict[str, Answer]:
    """The answers to this question that come in time."""
    found: dict[str, Answer] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            while len(found) < len(coords):
                for coord in [c for c in coords if c not in found]:
                    answer = await _read(member, f".uvcc/runs/{run}/{name_of(coord)}")
                    if answer.get("nonce") == nonce:
                        found[coord] = answer
                await asyncio.sleep(LOOK_S)
    return found


async def _read(member: Member, path: str) -> Answer:
    """A worker's answer; empty before its first."""
    try:
        return as_object(await member.ssh.read(path), LONGEST) or {}
    except UvccError:
        return {}
