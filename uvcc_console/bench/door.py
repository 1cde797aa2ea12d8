"""The halt sidecar's door, for benchmarks: it takes every order, notes when, and writes nothing but the verdict."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import TracebackType

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.haltd.order_socket import OrderServer
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import UvccError


class HaltDoor:
    """A door in a thread of this process. ``taken``: (mode, performance counter) of every order, oldest first.

    With ``noted`` each order is written in the journal once it was taken, as a sidecar would: whoever reads the run
    then sees what came of it.
    """

    def __init__(self, run_dir: Path, *, verdict_s: float | None = None, noted: bool = True) -> None:
        self.taken: list[tuple[str, float]] = []
        self._run_dir, self._verdict_s, self._noted = run_dir, verdict_s, noted
        self._loop = asyncio.new_event_loop()
        self._server = OrderServer(run_dir, self._asked)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._came = threading.Condition()

    def __enter__(self) -> HaltDoor:
        processes.write_record(self._run_dir, processes.HALTD)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.open(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _asked(self, request: ev.HaltRequested) -> None:
        with self._came:
            self.taken.append((request.mode, time.perf_counter()))
            self._came.notify_all()
        if self._noted:
            self._loop.call_soon(self._note, request)
        if self._verdict_s is not None:
            done = ev.HaltDone(
                ts=time.time(), nonce=request.nonce, mode=request.mode, verified=24, total=24, step=9, seconds=0.1
            )
            self._loop.call_later(self._verdict_s, self._server.publish, [done])

    def _note(self, request: ev.HaltRequested) -> None:
        journal = Journal(self._run_dir / JOURNAL, source="haltd")
        journal.append(request)
        journal.close()

    def wait_for(self, mode: str, since: float, limit_s: float) -> float:
        """The moment at which the first order of ``mode`` after ``since`` was taken, both in seconds of the performance
        counter. Raises UvccError if none comes in ``limit_s``.
        """

        def found() -> float:
            return next((at for was, at in self.taken if was == mode and at > since), 0.0)

        with self._came:
            if not self._came.wait_for(lambda: bool(found()), limit_s):
                raise UvccError(f"no {mode} within {limit_s:g} s", "the console did not act on the key")
            return found()
