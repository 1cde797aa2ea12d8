"""Halting by the control file alone: what the ladder sends becomes ``.HALT``, what heartbeats say is its evidence.

Nothing is ever ended there: a rung that would send a signal is refused, so the ladder has two, hold and halt.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.follow.reader import FolderReader
from uvcc_engine.contract.agent_protocol.agent_commands import Command, HaltCommand
from uvcc_engine.contract.agent_protocol.agent_messages import Ack, HaltStage
from uvcc_engine.contract.agent_protocol.wire import AckCode
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.run_files import control, files
from uvcc_engine.contract.run_files.control import HaltRequest, HaltVerdict

FOREIGN: Final = "it was not started from here: no process there is ended by signals"
LONGEST: Final = 64 << 10
_CODES: Final = {
    HaltVerdict.FINAL: (AckCode.FINAL, "the run is halting already"),
    HaltVerdict.OVERTAKEN: (AckCode.OVERTAKEN, "its release was there before it"),
    HaltVerdict.OTHER: (AckCode.OTHER, "it is held by somebody else"),
}


class ControlFileChannel:
    """What the ladder has instead of an agent. ``tell`` takes evidence, ``up`` says whether the folder answers."""

    def __init__(self, reader: FolderReader, up: Callable[[], bool], tell: Callable[[HaltStage], None]) -> None:
        self._reader, self._up, self._tell = reader, up, tell
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._nonce = ""
        self._mode = ""
        self._run = ""  # as the ladder named it: a trainer's exit record may tell its name only afterwards

    @property
    def up(self) -> bool:
        return self._up()

    def post(self, command: Command, *, nonce: str) -> asyncio.Future[Ack] | None:
        """Do what is asked; None while the folder is out of reach."""
        if not self.up:
            return None
        answer: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        if not isinstance(command, HaltCommand):
            answer.set_result(Ack(nonce=nonce, ok=False, code=AckCode.FAILED, error=FOREIGN))
            return answer
        self._start(self._write(command, nonce, answer))
        return answer

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, command: HaltCommand, nonce: str, answer: asyncio.Future[Ack]) -> None:
        try:
            async with self._writing:
                code, why = await self._ordered(command, nonce)
        except UvccError as e:
            code, why = AckCode.FAILED, str(e)
        if not answer.done():
            answer.set_result(Ack(nonce=nonce, ok=not why, code=code, error=why))

    async def _ordered(self, command: HaltCommand, nonce: str) -> tuple[AckCode, str]:
        """Write the control file unless the one rule of requests forbids it; why it was not written."""
        run, shell = self._reader.run, self._reader.shell
        said = await shell.run(read_script(self._reader.folder), limit=LONGEST)
        stamp, _, text = said.out.partition(b"\n")
        if said.exit or not stamp.isdigit():
            return AckCode.FAILED, "its folder does not answer"
        now = float(stamp)
        before = control.parse_halt(text, run) if text.strip(b"\n") != b"-" else None
        deadline = now + command.deadline_s if command.deadline_s else 0.0
        asked = HaltRequest(command.mode, nonce, run, deadline)
        verdict = control.verdict(before, asked, now)
        if verdict in _CODES:
            return _CODES[verdict]
        if verdict == HaltVerdict.OBEY:
            done = await shell.run(write_script(self._reader.folder, asked), limit=LONGEST)
            if done.out.strip() != b"written":
                return (
                    AckCode.FAILED,
                    f"{files.HALT} cannot be written there: is the folder yours, and the disk not full?",
                )
        self._nonce, self._mode, self._run = nonce, command.mode, command.run
        return AckCode.FAILED, ""

    def heard(self, event: ev.Event) -> None:
        """Evidence in what was read: a heartbeat that echoes the nonce, an exit record after it."""
        if not self._nonce:
            return
        if isinstance(event, ev.HeartbeatRead):
            phase, echoed = event.record.get("phase"), event.record.get("halt_nonce") == self._nonce
            step = event.record.get("step", -1)
            if echoed and phase in ("hold", "halted"):
                self._say("held" if phase == "hold" else "halted", event.coord, step)
            elif self._mode == control.RELEASE and phase not in ("hold", "halted") and not echoed:
                self._say("released", event.coord, step)
        elif isinstance(event, ev.EngineEvent) and event.event == "exit":
            fields = event.fields
            detail = "by its exit record; its process is not ours to look at"
            step, sha = fields.get("step", -1), str(fields.get("checkpoint", ""))
            self._say("gone", str(fields.get("coord", self._reader.coord)), step, sha, detail)

    def _say(self, stage: str, coord: str, step: object, checkpoint: str = "", detail: str = "") -> None:
        at = step if isinstance(step, int) else -1
        told = HaltStage(run=self._run, nonce=self._nonce, stage=stage, coord=coord, step=at)
        self._tell(replace(told, checkpoint=checkpoint, detail=detail))

    async def close(self) -> None:
        """What is being written is written."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)


def _at(folder: str) -> str:
    return shlex.quote(folder if folder.startswith("/") else f"./{folder}")


def read_script(folder: str) -> str:
    """The machine's clock, and the control file or ``-``."""
    return (
        f"exec 2>/dev/null; unset CDPATH; cd {_at(folder)} >/dev/null || exit 3; date +%s\n"
        f"if [ -f {files.HALT} ]; then head -c {LONGEST // 2} {files.HALT} </dev/null; else echo -; fi\n"
    )


def write_script(folder: str, asked: HaltRequest) -> str:
    """Replace the control file as a whole. A link in its place is replaced, not followed."""
    told = {"mode": asked.mode, "nonce": asked.nonce, "deadline": asked.deadline}
    text = json.dumps(told | ({"run": asked.run} if asked.run else {}))
    part = f"{files.HALT}.uvcc.part"
    return (
        f"exec 2>/dev/null; unset CDPATH; cd {_at(folder)} >/dev/null || exit 3\n"
        f"rm -f {part} && (set -C; printf '%s\\n' {shlex.quote(text)} >{part}) && mv -f {part} {files.HALT}"
        " && echo written\n"
    )
