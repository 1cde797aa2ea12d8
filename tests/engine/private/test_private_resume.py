"""A resume goes on over whole evidence from the newest checkpoint, or says what is damaged and does not go on."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_kit import Fleet, Zygote, direct_links
from test_private_worker import JOB, halt, until

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.run_files.control import HALT, HOLD, RELEASE
from uvcc_engine.transcript.leaves.leaf_file import next_block

SMALL = replace(JOB, steps=6, checkpoint_every=2)


@pytest.fixture(scope="module")
def halted(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Stopped at step 4 or later, with checkpoints of step 2 and of where it stopped, at least."""
    fleet = Fleet(tmp_path_factory.mktemp("halted"), zygote, SMALL, direct_links())
    fleet.launch(halt=HOLD)
    until(lambda: fleet.events(0, "held"), 500, "the hold")
    halt(fleet, 2, RELEASE, "early")
    until(lambda: len(fleet.roots(0)) >= 4, 500, "steps")
    halt(fleet, 0, HALT, "stop")
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    return fleet


@pytest.fixture
def fleet(halted: Fleet, tmp_path: Path) -> Fleet:
    """A copy of the halted run that may be spoilt."""
    mine = copy.copy(halted)
    mine.folder, mine.links, mine.pids = tmp_path / "copy", direct_links(), []
    shutil.copytree(halted.folder, mine.folder)
    return mine


def newest(fleet: Fleet, party: int = 0) -> int:
    return ck.steps_present(fleet.dir(party) / "checkpoints")[0]


def transcript(fleet: Fleet, party: int, name: str) -> Path:
    return fleet.dir(party) / f"transcript_p{party}r0s0t0" / name


def alter_leaf(fleet: Fleet) -> None:
    path = transcript(fleet, 1, "leaves.bin")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(bytes(data))


def alter_roots(fleet: Fleet) -> None:
    path = transcript(fleet, 1, "roots.jsonl")
    first, *rest = path.read_bytes().splitlines(keepends=True)
    entry = json.loads(first)
    entry["statement"]["leaves"] += 1
    path.write_bytes(json.dumps(entry).encode() + b"\n" + b"".join(rest))


def alter_peers(fleet: Fleet) -> None:
    path = transcript(fleet, 1, "peers.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))


def alter_tensors(fleet: Fleet) -> None:
    path = fleet.dir(1) / "checkpoints" / f"step-{newest(fleet)}" / "rank0.sealed"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(bytes(data))


def alter_manifest(fleet: Fleet) -> None:
    path = fleet.dir(1) / "checkpoints" / f"step-{newest(fleet)}" / ck.MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"attempt":0', b'"attempt":1'))


def lose_manifest(fleet: Fleet) -> None:
    (fleet.dir(1) / "checkpoints" / f"step-{newest(fleet)}" / ck.MANIFEST).unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (alter_leaf, "transcript_p1r0s0t0/leaves.bin, epoch 0: "),
        (alter_roots, "transcript_p1r0s0t0/roots.jsonl, epoch 0: the signature of P1 does not hold"),
        pytest.param(
            alter_peers, "transcript_p1r0s0t0/peers.jsonl, epoch 0: ", id="peers", marks=pytest.mark.ci(__file__)
        ),
        (alter_tensors, "rank0.sealed was altered"),
        pytest.param(alter_manifest, "MANIFEST.json was altered", id="manifest", marks=pytest.mark.ci(__file__)),
        (lose_manifest, "has no manifest"),
    ],
)
def test_damage_is_refused_by_name_before_any_training(
    fleet: Fleet, spoil: Callable[[Fleet], None], words: str
) -> None:
    spoil(fleet)
    kept = {p: p.read_bytes() for i in range(3) for p in sorted(fleet.dir(i).glob("transcript_*/leaves.bin"))}
    began = time.monotonic()
    fleet.launch(resume=True)
    assert fleet.wait() == [4, 1, 4]
    assert time.monotonic() - began < 120.0
    said = fleet.exit(1)
    assert words in said["error"]
    assert "party" not in said  # nobody is accused of what happened to a file here
    assert "uvcc resume RUN --from" in said["hint"]
    for p in (0, 2):
        assert "P1 stopped: " in fleet.exit(p)["error"]  # said by P1, or passed on by the third
        assert words in fleet.exit(p)["error"]
    assert {len(fleet.events(p, "party_start")) for p in range(3)} == {1}  # the first time
    assert {p: p.read_bytes() for p in kept} == kept


def test_a_checkpoint_that_was_never_completed_is_passed_over(fleet: Fleet) -> None:
    root = fleet.dir(1) / "checkpoints"
    torn = root / "step-9.tmp-0123456789ab"
    torn.mkdir()
    (torn / "rank0.sealed").write_bytes(b"half of i")
    at = newest(fleet)
    fleet.launch(resume=True)
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert [fleet.events(p, "resumed")[-1]["step"] for p in range(3)] == [at] * 3
    assert [fleet.events(p, "evidence_replayed")[-1]["epochs"] for p in range(3)] == [at] * 3
    assert not fleet.events(1, "checkpoint_refused")


@pytest.mark.ci(__file__)
def test_the_operator_may_decide_to_go_on_from_an_earlier_checkpoint(
    fleet: Fleet, zygote: Zygote, tmp_path: Path
) -> None:
    held = ck.steps_present(fleet.dir(1) / "checkpoints")
    alter_tensors(fleet)
    fleet.launch(resume=True, start=3)
    assert fleet.wait() == [2, 2, 2]
    assert "all hold steps 2" in fleet.exit(0)["error"]
    fleet.launch(resume=True, start=newest(fleet))
    assert fleet.wait()[1] == 1
    assert "was altered" in fleet.exit(1)["error"]
    fleet.launch(resume=True, start=2)
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert [fleet.events(p, "resumed")[-1]["step"] for p in range(3)] == [2] * 3
    aside = fleet.dir(1) / "aside1_checkpoints"
    assert ck.steps_present(aside) == [step for step in held if step > 2]
    calm = Fleet(tmp_path / "calm", zygote, SMALL, direct_links())
    calm.launch()
    assert calm.wait() == [0, 0, 0]
    for p in range(3):  # the same messages under the same masks: nothing tells that it was repeated
        assert fleet.result(p)["result_hash"] == calm.result(0)["result_hash"]
        assert fleet.roots(p) == calm.roots(p)


def test_starting_over_is_another_attempt_that_keeps_what_the_first_one_left(fleet: Fleet) -> None:
    alter_leaf(fleet)
    before = transcript(fleet, 1, "leaves.bin").read_bytes()
    fleet.launch(resume=True, start=0, attempt=1)
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert (fleet.dir(1) / "earlier0_transcript_p1r0s0t0" / "leaves.bin").read_bytes() == before
    assert (fleet.dir(1) / "earlier0_checkpoints").is_dir()


def cut_short(fleet: Fleet, party: int, epochs: int) -> None:
    """What a power cut leaves of a transcript: what was durable at the last checkpoint."""
    path = transcript(fleet, party, "leaves.bin")
    with path.open("rb") as f:
        end = 0
        for _ in range(epochs):
            block = next_block(f, end, path.stat().st_size)
            assert block is not None
            end = block.end
    os.truncate(path, end)
    for name in ("roots.jsonl", "peers.jsonl", "openings.jsonl"):
        whole = transcript(fleet, party, name).read_bytes().splitlines(keepends=True)
        kept = [line for line in whole if epoch_of(json.loads(line)) < epochs]
        transcript(fleet, party, name).write_bytes(b"".join(kept))


def epoch_of(line: dict[str, Any]) -> int:
    return int(line["epoch"] if "epoch" in line else line["statement"]["epoch"])


def test_a_transcript_cut_short_by_a_power_cut_takes_a_higher_attempt(fleet: Fleet) -> None:
    began = len(fleet.roots(1))
    cut_short(fleet, 1, 2)
    fleet.launch(resume=True, start=2)
    assert fleet.wait()[1] == 2
    said = fleet.exit(1)
    assert f"holds 2 epochs of the {began} that this identity may have begun in attempt 0" in said["error"]
    assert "starts attempt 1 on all pods" in said["hint"]
    assert json.loads((fleet.dir(1) / "least_attempt_p1r0s0t0.json").read_text()) == {"least": 1}
    assert len(fleet.roots(1)) == began  # nothing was trained
    fleet.launch(resume=True, attempt=1)
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]


def test_the_same_session_in_a_second_directory_takes_a_higher_attempt(fleet: Fleet) -> None:
    fleet.dir = lambda party: fleet.home(party) / "second"  # type: ignore[method-assign]
    fleet.launch()
    assert set(fleet.wait()) <= {2, 4}
    said = [fleet.exit(p)["error"] for p in range(3)]
    assert any("attempt 0 of this session was begun in ../run, not in ../second" in text for text in said)
    assert not any(fleet.roots(p) for p in range(3))
