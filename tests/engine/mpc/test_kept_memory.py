"""Memory that a step frees is there for the next one, without new pages from the system."""

from __future__ import annotations

import os
import resource
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from uvcc_engine.mpc.kernels.memory import keep_freed_memory
from uvcc_engine.worker import main as worker

NUMBERS = 5 << 20  # 40 MiB: more than glibc ever keeps by itself


def _new_pages(kept: bool) -> int:
    """Pages that a fourth step takes anew, in a process of its own whose allocator may be changed."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        if kept and not keep_freed_memory():
            os._exit(1)
        for _ in range(4):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for value in range(3):
                torch.full((NUMBERS,), value, dtype=torch.int64)
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        os.write(writer, str(taken).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        found = stream.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return int(found)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_a_step_finds_the_memory_of_the_step_before() -> None:
    torch.set_num_threads(1)  # threads do not come along into a fork
    pages = 3 * NUMBERS * 8 // resource.getpagesize()
    assert _new_pages(kept=True) < pages / 20
    assert _new_pages(kept=False) > pages / 2, "the allocator keeps such memory by itself: this module is for nothing"


def test_a_worker_keeps_memory_before_it_does_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "keep_freed_memory", kept)
    spec: Any = SimpleNamespace(dir="/nowhere")
    with pytest.raises(KeyboardInterrupt):
        worker.main(spec)
