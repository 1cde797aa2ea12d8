"""How a trainer of one's own obeys the control file: one call a step. Standard library only.

A hold keeps the caller waiting between two steps, with heartbeats that carry its nonce; a release lets it go on; a
halt ends the training after a checkpoint. Several ranks decide together, so that none of them waits in a collective
operation for one that has stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.run_files.control import HALT, HOLD, HaltRequest

HOLD_POLL_S: Final = 0.05


class TrainingHalted(SystemExit):
    """The operator halted the run; everything is written. Not caught, it ends the process with exit code 0."""

    def __init__(self, step: int, checkpoint: str) -> None:
        super().__init__(0)
        self.step = step
        self.checkpoint = checkpoint


class Writing(Protocol):
    """What obeying needs of a :class:`RunWriter`."""

    @property
    def lead(self) -> bool: ...

    def poll_halt(self) -> HaltRequest | None: ...

    def heartbeat(self, step: int, phase: str, msg: str = "", **extra: Any) -> bool: ...

    def event(self, name: str, level: str = "info", **fields: Any) -> None: ...

    def exit(self, status: str, *, step: int = -1, checkpoint: str = "") -> None: ...


def largest_vote(vote: int) -> int:
    """The largest vote of all ranks: of this process's ``torch.distributed`` group where it has one, else ``vote``.

    Never imports torch: a trainer with several ranks has done so.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return vote
    torch: Any = sys.modules["torch"]
    device = torch.device("cuda", torch.cuda.current_device()) if distributed.get_backend() == "nccl" else "cpu"
    ballot = torch.tensor([vote], dtype=torch.int64, device=device)
    distributed.all_reduce(ballot, op=distributed.ReduceOp.MAX)
    return int(ballot.item())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file; of a folder that of its lines ``HASH  relative/path``, ordered by path, as sha256sum's.

    Raises UvccError where it cannot be read.
    """
    try:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file())
            lines = "".join(f"{_of_file(p)}  {p.relative_to(path).as_posix()}\n" for p in found)
            return hashlib.sha256(lines.encode()).hexdigest()
        return _of_file(path)
    except OSError as error:
        what = f"the checkpoint {path} cannot be read: {error.strerror}"
        raise UvccError(what, "let save return the file or folder that it wrote") from error


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Obeying:
    """Obeys the control file of one run for one rank.

    ``largest`` takes this rank's vote (0 go on, 1 hold, 2 halt) and returns the largest of all ranks.
    """

    def __init__(
        self,
        writer: Writing,
        *,
        largest: Callable[[int], int] = largest_vote,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._writer = writer
        self._largest = largest
        self._pause = pause
        self._asked_to_end = False
        self._listens = False

    def _listen(self) -> None:
        """Let SIGTERM ask for a halt at the next step, unless the program has a handler of its own."""
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end = True

    def obey(self, step: int) -> HaltRequest | None:
        """Wait while held; the request if the run is to halt now, else None. All ranks return alike."""
        self._listen()
        decision, asked = self._decide()
        if decision == 0:
            return None
        nonce = asked.nonce
        if decision == 1:
            self._tell("held", nonce=nonce, step=step)
        while decision == 1:
            self._writer.heartbeat(step, "hold", "held", halt_nonce=nonce)
            self._pause(HOLD_POLL_S)
            decision, asked = self._decide()
            nonce = asked.nonce or nonce
        if decision == 0:
            self._tell("released", nonce=nonce)
            self._writer.heartbeat(step, "train", "released")
            return None
        return HaltRequest(HALT, nonce)

    def _decide(self) -> tuple[int, HaltRequest]:
        """What all ranks do now, and the request that says so; without a name where only another rank has seen it."""
        mine = self._writer.poll_halt()
        decision = self._largest(2 if self._asked_to_end else mine.vote if mine else 0)
        if mine is None or mine.vote != decision:
            mine = self._writer.poll_halt()  # another rank has read what was not there a moment ago
        if mine is None or (mine.vote != decision and decision > 0):
            mine = HaltRequest(HALT if decision == 2 else HOLD)
        return decision, mine

    def halted(self, asked: HaltRequest, step: int, checkpoint: str | Path | None = None) -> str:
        """Say that the run halted after ``step`` with this checkpoint (a file or a folder, None = none); its SHA-256.

        Raises UvccError where the checkpoint cannot be read or the run directory not be written.
        """
        sha256 = sha256_of(Path(checkpoint)) if checkpoint is not None and self._writer.lead else ""
        if sha256:
            self._tell("checkpoint_written", step=step, sha256=sha256)
        self._tell("halted", nonce=asked.nonce, step=step, checkpoint=sha256)
        self._writer.heartbeat(step, "halted", "halted", halt_nonce=asked.nonce)
        self._writer.exit("halted", step=step, checkpoint=sha256)
        return sha256

    def _tell(self, name: str, **fields: Any) -> None:
        if self._writer.lead:
            self._writer.event(name, **fields)


def launched_by_torchrun(env: Mapping[str, str]) -> int | None:
    """This process's rank where ``torchrun`` started it, else None."""
    with contextlib.suppress(ValueError):
        return int(env["RANK"]) if "TORCHELASTIC_RUN_ID" in env and "RANK" in env else None
    return None
