"""A disk that became read-only: what it does not keep is an error that names the file, and leaves no file open."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from test_store import open_store

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.json_lines import LineLog


def refusing(patch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    patch.setattr(leaf_file.os, "fsync", fsync)


def test_a_transcript_that_is_not_kept_is_named_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = open_store(tmp_path, 0)
    s.begin_epoch(0)
    s.record(0, 1, (0, 0, 0, kinds.OPEN), b"x")
    s.finalize_epoch()
    refusing(monkeypatch)
    with pytest.raises(UvccError, match=r"cannot write .*leaves\.bin: Read-only file system") as told:
        s.close()
    assert "free" not in told.value.hint  # there is room
    s.close()
    monkeypatch.undo()
    assert open_store(tmp_path, 0, 1).epochs == 1  # its lock was given back


def test_lines_that_are_not_kept_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LineLog(tmp_path / "peers.jsonl")
    refusing(monkeypatch)
    with pytest.raises(UvccError, match=r"cannot write .*peers\.jsonl: Read-only file system"):
        log.sync()
    log.close()
