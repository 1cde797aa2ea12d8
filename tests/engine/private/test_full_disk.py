"""A worker whose disk takes nothing more ends with the code of what failed, and its log's last line says why."""

from __future__ import annotations

from pathlib import Path

from private_kit import Fleet, Zygote, direct_links

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob

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
