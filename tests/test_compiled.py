"""pytest's workers wait for what is compiled for all of them, and for nothing that has ended."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from compile_loops import ATTENTION, hand_on
from compiled import PROGRAM, start, wait


@pytest.mark.parametrize("code", [0, 1])
def test_whoever_waits_goes_on_when_the_process_has_ended(tmp_path: Path, code: int) -> None:
    lock, done, ended = tmp_path / "lock", tmp_path / "done", []
    process = start(["-c", f"import pathlib, sys\npathlib.Path({str(done)!r}).touch()\nsys.exit({code})"], lock)

    def waiter() -> None:
        wait(lock)
        ended.append(done.exists())

    waiting = threading.Thread(target=waiter)
    waiting.start()
    waiting.join(120)
    assert ended == [True]
    assert process.wait(120) == code


def test_what_is_started_is_there() -> None:
    assert PROGRAM.exists()
    assert ATTENTION.exists()


def test_another_copy_gets_the_code_its_mark_and_nothing_of_older_sources(tmp_path: Path) -> None:
    kept, other = tmp_path / "kept", tmp_path / "other"
    for name in ("loops-new", "loops-old", "attention-x"):
        (kept / name).mkdir(parents=True)
        (kept / name / "f.nbi").write_text(name)
    for name in ("loops-new.done", "loops-old.done", "gemm-1.json", "gemm-1.lock"):
        (kept / name).touch()
    hand_on(kept, other, "loops-new.done")
    assert {p.name for p in other.iterdir()} == {"loops-new", "loops-new.done", "attention-x", "gemm-1.json"}
    assert (other / "loops-new" / "f.nbi").read_text() == "loops-new"
