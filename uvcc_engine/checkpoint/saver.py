"""Writing checkpoints beside the training: the state is taken at once, the disk is waited for in a thread.

The ranks of a pod share its directory. Each writes its part; the lead rank, when it sees all parts, commits the
checkpoint; the others wait until it has. They meet in the directory alone, so no rank's training waits for another's
disk. At most one checkpoint is under way: the next one waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import PeerLostError, UvccError

_LOOK_S: Final = 0.02
_SISTERS_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """Where this rank's checkpoints go. ``token`` is the same at all ranks of the pod and new at each start."""

    root: Path
    run: str
    rank: int
    pod: Sequence[int]
    leads: bool
    token: str
    topology: Mapping[str, Any]
    keep: int


class Saver:
    """Owns the writing thread of one rank. ``on_written(step, sha256)`` is called in it."""

    def __init__(self, place: CheckpointPlace, on_written: Callable[[int, str], None]) -> None:
        self._place = place
        self._on_written = on_written
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[ck.CheckpointManifest] | None = None
        self._closing = threading.Event()
        self._newest: ck.CheckpointManifest | None = None

    def start(self, step: int, state: ck.RankState, contents: Mapping[str, bytes]) -> None:
        """Begin to write the checkpoint of ``step``. Raises what the write before it raised."""
        self.wait()
        self._under_way = self._pool.submit(self._write, step, state, dict(contents))

    @property
    def saved(self) -> ck.CheckpointManifest | None:
        """The newest checkpoint that is whole on this pod's disk. Raises what its write raised."""
        if self._under_way is not None and self._under_way.done():
            self.wait()
        return self._newest

    def wait(self) -> ck.CheckpointManifest | None:
        """The newest checkpoint, once nothing is under way. Raises what its write raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._newest = under_way.result()
        return self._newest

    def close(self) -> None:
        """End the thread; what is under way and not whole yet is given up. Harmless twice."""
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, step: int, state: ck.RankState, contents: Mapping[str, bytes]) -> ck.CheckpointManifest:
        at = self._place
        ck.write_rank(at.root, step, at.token, state, contents)
        if at.leads:
            self._until(lambda: ck.parts_are_there(at.root, step, at.token, at.pod), step)
            found = ck.commit(at.root, run=at.run, step=step, token=at.token, ranks=at.pod, topology=at.topology)
            ck.prune(at.root, at.keep)
        else:
            self._until(lambda: ck.is_settled(at.root, step, at.token), step)
            found = ck.read_manifest(ck.step_dir(at.root, step))
        self._on_written(step, found.sha256)
        return found

    def _until(self, there: Callable[[], bool], step: int) -> None:
        deadline = time.monotonic() + _SISTERS_S
        while not there():
            if self._closing.wait(_LOOK_S):
                raise UvccError(f"the checkpoint of step {step} was given up", "this worker ends")
            if time.monotonic() > deadline:
                what = f"the checkpoint of step {step} lacks the part of a sister rank"
                raise PeerLostError(what, "see how the pod's other workers ended")
