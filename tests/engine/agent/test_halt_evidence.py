"""What an agent takes as evidence of a halt, looked at without a process: heartbeats, exit records, checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.agent.halts import HaltWatch
from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.agent.processes.workers import EXITED, Worker
from uvcc_engine.contract.agent_protocol.wire import Lacks
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.control import HALT, HOLD, RELEASE, HaltRequest

COORD = "p0r0s0t0"
SINCE = 1000.0


@dataclasses.dataclass
class _Pod:
    """One worker's folder and the watch over it; ``told``: what the console hears."""

    folder: Path
    mode: str = HALT
    told: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        spec = WorkerSpec(run="r", coord=COORD, dir=str(self.folder), kind="private")
        self.folder.mkdir(exist_ok=True)
        self.worker = Worker(spec, ProcessId(7, 8, "boot"), SINCE)
        self.watch = HaltWatch(self.request(self.mode), self.told.append, SINCE)

    @staticmethod
    def request(mode: str, nonce: str = "n1") -> HaltRequest:
        return HaltRequest(mode=mode, nonce=nonce, run="r")

    def beat(self, phase: str, step: int = 4, nonce: str = "n1", ts: float = SINCE + 1, **more: Any) -> list[str]:
        """A heartbeat is written and looked at; the stages that are told because of it."""
        record = {"coord": COORD, "phase": phase, "step": step, "halt_nonce": nonce, "ts": ts, **more}
        with (self.folder / files.heartbeat_name(0)).open("a") as out:
            out.write(json.dumps(record) + "\n")
        return self.look()

    def look(self) -> list[str]:
        before = len(self.told)
        while self.watch.check([self.worker]):
            pass
        return [m["stage"] for m in self.told[before:]]

    def ended(self, **record: Any) -> dict[str, Any]:
        """The process is absent, and left this exit record ({} = none); what is told of it in the end."""
        if record:
            own = {"run": "r", "coord": COORD, "pid": 7, "starttime": 8, "ts": SINCE + 2}
            (self.folder / "exit.json").write_text(json.dumps(own | record))
        self.worker = dataclasses.replace(self.worker, state=EXITED, rc=0, signal="")
        assert self.look()[-1:] == ["gone"]
        return self.told[-1]


def test_only_the_nonce_that_was_asked_for_is_an_answer(tmp_path: Path) -> None:
    pod = _Pod(tmp_path)
    for other in ("", "n0", "N1"):
        assert pod.beat("halted", nonce=other) == []
        assert pod.beat("held", nonce=other) == []
    assert pod.beat("halted", step=5, checkpoint="ab" * 32) == ["halted"]
    assert (pod.told[-1]["step"], pod.told[-1]["checkpoint"], pod.told[-1]["nonce"]) == (5, "ab" * 32, "n1")


def test_a_worker_that_only_knows_the_nonce_is_not_held(tmp_path: Path) -> None:
    """It echoes it as soon as it has read it: until its phase says so it computes on."""
    pod = _Pod(tmp_path, HOLD)
    assert pod.beat("train") == []
    assert pod.beat("hold") == ["held"]
    assert pod.beat("held", step=9) == [], "what was reached is not reached again"
    assert pod.told[-1]["step"] == 4


def test_a_stage_never_goes_back(tmp_path: Path) -> None:
    pod = _Pod(tmp_path)
    assert pod.beat("halted") == ["halted"]
    assert pod.beat("held") == []
    assert pod.beat("train") == []


def test_a_release_is_reached_by_who_goes_on_behind_it(tmp_path: Path) -> None:
    pod = _Pod(tmp_path, HOLD)
    assert pod.beat("train") == [], "a hold is not released by itself"
    assert pod.beat("held") == ["held"]
    pod.watch.upgrade(pod.request(RELEASE))
    pod.watch.since = SINCE + 10
    assert not pod.watch.settled([pod.worker])
    assert pod.beat("held", ts=SINCE + 11) == []
    assert pod.beat("train", ts=SINCE + 9) == [], "that was before it"
    assert pod.beat("train", step=6, ts=SINCE + 10) == ["released"]
    assert (pod.told[-1]["step"], pod.told[-1]["mode"]) == (6, RELEASE)
    assert pod.watch.settled([pod.worker])


def test_a_hold_after_a_release_is_waited_for_anew(tmp_path: Path) -> None:
    pod = _Pod(tmp_path, HOLD)
    assert pod.beat("held") == ["held"]
    since = pod.watch.since
    pod.watch.upgrade(pod.request(HOLD))
    assert pod.watch.since == since, "the same once more is no other time"
    assert pod.look() == []
    pod.watch.upgrade(pod.request(RELEASE))
    assert pod.watch.since > since
    assert pod.beat("train", ts=pod.watch.since) == ["released"]
    pod.watch.upgrade(pod.request(HOLD))
    assert not pod.watch.settled([pod.worker])
    assert pod.beat("held", step=8) == ["held"]
    assert pod.told[-1]["step"] == 8


def test_a_console_that_asks_again_is_told_all_that_is_known(tmp_path: Path) -> None:
    pod = _Pod(tmp_path)
    pod.beat("halted", step=5)
    pod.watch.retell()
    seen, halted = pod.told[-2:]
    assert (seen["stage"], seen["coord"], seen["step"]) == ("seen", "", -1)
    assert (halted["stage"], halted["coord"], halted["step"]) == ("halted", COORD, 5)
    quiet = _Pod(tmp_path / "quiet")
    quiet.look()
    quiet.watch.retell()
    assert [m["stage"] for m in quiet.told] == ["seen"]


@pytest.mark.parametrize(
    ("record", "lacks", "said"),
    [
        ({}, Lacks.NO_EXIT, "ended by code 0 without an exit.json of this run"),
        ({"status": "halted", "pid": 9, "ts": SINCE - 2}, Lacks.NO_EXIT, "ended by code 0"),
        ({"status": "failed", "error": "out of memory"}, Lacks.FAILED, "failed: out of memory"),
        ({"status": "failed"}, Lacks.FAILED, "failed"),
        ({"status": "done"}, Lacks.DONE, "done without a checkpoint"),
        ({"status": "halted"}, Lacks.NOT_NAMED, "halted without a checkpoint"),
        ({"status": "halted", "step": 4, "checkpoint": "ab" * 32}, Lacks.DAMAGED, ""),
    ],
)
def test_an_absent_process_is_evidence_of_no_checkpoint_by_itself(
    record: dict[str, Any], lacks: Lacks, said: str, tmp_path: Path
) -> None:
    """Also where a heartbeat had named one before."""
    pod = _Pod(tmp_path)
    pod.beat("halted", checkpoint="cd" * 32)
    gone = pod.ended(**record)
    assert (gone["checkpoint"], Lacks(gone["lacks"])) == ("", lacks)
    assert gone["detail"].startswith(said)
    assert not gone["detail"].endswith((":", " "))
    assert "program's own" not in gone["detail"], "of a training it would be missing"
    assert pod.look() == [], "it is told once"
    assert pod.watch.settled([pod.worker])


@pytest.mark.parametrize("status", ["halted", "done"])
def test_a_checkpoint_that_verifies_is_the_evidence(status: str, tmp_path: Path) -> None:
    pod = _Pod(tmp_path)
    contents = {f"{n}": bytes([n]) * 4096 for n in range(4)}
    made = checkpoint.save(tmp_path / files.CHECKPOINTS, run="r", step=6, topology={}, contents=contents)
    gone = pod.ended(status=status, step=6, checkpoint=made.sha256)
    assert (gone["checkpoint"], gone["step"], Lacks(gone["lacks"])) == (made.sha256, 6, Lacks.NOTHING)
