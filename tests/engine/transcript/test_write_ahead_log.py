"""The open epoch's records: what another process finds of them, over several windows, and on a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.transcript.leaves import write_ahead_log
from uvcc_engine.transcript.leaves.leaf import RECORD
from uvcc_engine.transcript.leaves.write_ahead_log import WriteAheadLog, open_records

SID = bytes(range(32))


def record(n: int) -> bytes:
    return RECORD.pack(1, 2, 0, 1, n, 0, 3, 4, n.to_bytes(32, "big"))


def test_a_process_that_is_killed_leaves_every_record(tmp_path: Path) -> None:
    count = 2 * write_ahead_log.IN_WINDOW + 5
    body = f"""
import os, signal, pathlib
from tests_openlog import SID, record
from uvcc_engine.transcript.leaves.write_ahead_log import WriteAheadLog
log = WriteAheadLog(pathlib.Path({str(tmp_path)!r}), SID, 3)
log.begin(3)
for n in range({count}):
    log.add(record(n))
os.kill(os.getpid(), signal.SIGKILL)
""".replace("tests_openlog", Path(__file__).stem)
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{Path(__file__).parents[3]}"}
    died = subprocess.run([sys.executable, "-c", body], env=env, check=False)
    assert died.returncode == -9
    assert list(open_records(tmp_path, 3)) == [record(n) for n in range(count)]
    assert list(open_records(tmp_path, 2)) == []
    again = WriteAheadLog(tmp_path, SID, 3)
    left = again.begin(3)
    assert list(left) == [record(n) for n in range(count)]
    again.add(record(count))
    assert list(open_records(tmp_path, 3))[-2:] == [record(count - 1), record(count)]
    again.begin(4)
    assert list(open_records(tmp_path, 4)) == []
    again.add(record(7))
    again.close()
    again.close()
    assert list(open_records(tmp_path, 4)) == [record(7)]


def test_records_of_another_session_or_epoch_do_not_count(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, SID, 0)
    log.begin(0)
    log.add(record(1))
    log.close()
    for sid, epoch in ((bytes(32), 0), (SID, 1)):
        other = WriteAheadLog(tmp_path, sid, epoch)
        assert list(other.begin(epoch)) == []
        other.close()


@pytest.mark.parametrize("size", [0, 50, 10_000])
def test_an_empty_file_is_begun_anew(tmp_path: Path, size: int) -> None:
    (tmp_path / "open.bin").write_bytes(bytes(size))
    assert list(open_records(tmp_path, 0)) == []
    log = WriteAheadLog(tmp_path, SID, 0)
    assert list(log.begin(0)) == []
    log.add(record(0))
    assert list(open_records(tmp_path, 0)) == [record(0)]


def test_no_file_is_no_records(tmp_path: Path) -> None:
    assert list(open_records(tmp_path / "absent", 0)) == []


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = WriteAheadLog(tmp_path, SID, 0)
    log.begin(0)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    for n in range(write_ahead_log.IN_WINDOW):
        log.add(record(n))
    with pytest.raises(UvccError, match=r"cannot write .*open\.bin: No space left"):
        log.add(record(0))
    assert len(list(open_records(tmp_path, 0))) == write_ahead_log.IN_WINDOW
