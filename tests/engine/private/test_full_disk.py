"""A worker whose disk takes nothing more ends with the code of what failed, and its log's last line says why."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from private_kit import Fleet, Zygote, direct_links

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.worker.main import close_session

JOB = PrivateJob(steps=2, batch=16, checkpoint_every=1, test_rows=50, reveal=("loss",))


def test_where_no_exit_record_can_be_written_the_reason_is_told_all_the_same(tmp_path: Path, zygote: Zygote) -> None:
    """It ended with 70 and a traceback of the record that could not be written, which a full disk cut in its middle."""
    fleet = Fleet(tmp_path, zygote, JOB, direct_links())
    (fleet.home(1) / "inputs").write_bytes(b"others")
    (fleet.dir(1) / "exit.json" / "refuses").mkdir(parents=True)  # as a full disk does
    log = fleet.home(1) / "worker.log"
    fleet.pids.append(zygote.ask({"spec": fleet.spec(1).to_json(), "log": str(log)})["pid"])
    assert fleet.wait() == [ConfigError.exit_code]
    last = log.read_text().splitlines()[-1]
    assert last.startswith("error: not a sealed file")
    assert fleet.events(1, "run_failed")[0]["what"] in last


class Refusing:
    """A session whose files a disk that became read-only does not take."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def close(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [OSError(errno.EROFS, "Read-only file system"), UvccError("cannot write leaves.bin")])
def test_what_cannot_be_closed_hides_no_reason_and_is_one_where_there_is_none(error: Exception) -> None:
    """Its peers hear why it stops after this: it ended with 70, and they waited for it until they were killed."""
    close_session(Refusing(error), well=False)  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        close_session(Refusing(error), well=True)  # type: ignore[arg-type]
