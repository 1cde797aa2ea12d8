"""Two replicas of real workers under proofs: verified with every place's verdicts; a lie or a crash at one place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replica_kit import job_of, rows_of

from uvcc_engine.bench.launch import fleet as fleets
from uvcc_engine.bench.launch.fleet import Fleet, Forker
from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import Leaf
from uvcc_engine.transcript.proof import cross_signatures, standalone_verify
from uvcc_engine.transcript.proof.bundle import NAME, read_bundle
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signed.statements import RootStatement

TWO = Topology(2)
LIAR = Coord(1, 1, 0, 0)
JOB = job_of(["linear"], steps=3, verify="proofs", checkpoint_every=1, reveal=("loss", "accuracy"))


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    lying = [sys.executable, str(Path(__file__).with_name("lying_forker.py"))]
    made = Forker(tmp_path_factory.mktemp("forker"), within=lying)
    yield made
    made.close()


def _fleet(folder: Path, forker: Forker, job: PrivateJob = JOB) -> Fleet:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleets, "dataset_for", rows_of)
        return Fleet(folder, forker, job, TWO)


def _run(fleet: Fleet, lie: str = "", **changes: Any) -> dict[Coord, int]:
    fleet.env = {"LIE": f"{LIAR}:{lie}"} if lie else {}
    fleet.launch(**changes)
    return fleet.wait()


def _losses(fleet: Fleet, c: Coord) -> int:
    return len((fleet.dir(c) / "training.csv").read_text().splitlines()) - 1


def _roots(fleet: Fleet, c: Coord) -> dict[int, str]:
    return {e["epoch"]: e["root"] for e in fleet.events(c, "epoch_root")}


@pytest.fixture(scope="module")
def whole(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    fleet = _fleet(tmp_path_factory.mktemp("whole") / "fleet", forker)
    assert set(_run(fleet).values()) == {0}, fleet.logs()
    return fleet


@pytest.fixture(scope="module")
def bundle(whole: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "out"
    whole.verified(out)
    return out / NAME


@pytest.mark.ci("tests/engine/proofs/test_proved_replicas.py")
def test_a_proved_run_of_two_replicas_is_verified_with_the_verdicts_of_both(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = verify(bundle)
    assert (certificate.verify, certificate.level) == ("proofs", "transcripts")
    assert "every message between the domains is proved" in certificate.text()
    standalone_verify.main([str(bundle)])
    assert "every message between them was proved" in capsys.readouterr().out
    stated = {w.coord: [s.proved for _, s in w.roots] for w in read_bundle(bundle, lambda policy: True).workers}
    assert len(stated) == 6
    coins = set()
    for c, verdicts in stated.items():
        assert verdicts == stated[Coord(c.replica, 0, 0, 0)]
        assert len(verdicts) == JOB.steps + 1
        assert all(v is not None and v.claims > 20 for v in verdicts)
        coins |= {v.coins for v in verdicts if v is not None}
        for file, block in leaf_file.blocks(bundle.parent / str(c.replica) / f"transcript_{c}" / leaf_file.LEAVES):
            assert {kinds.PROOF, kinds.COIN} <= {Leaf.unpack(r).kind for r in leaf_file.records(file, block)}
    assert len(coins) == 2 * (JOB.steps + 1)
    at_first = sum(v.claims for v in stated[Coord(0, 0, 0, 0)] if v is not None)
    assert certificate.claims > at_first, "the other replica's claims are not counted"


@pytest.mark.ci("tests/engine/proofs/test_proved_replicas.py")
@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda s: s.pop("proved"), "verdict: whether epoch 1 of p2r1s0t0 states a proof"),
        (lambda s: s["proved"].update(coins="0" * 64), "verdict: what was proved in epoch 1 of p2r1s0t0"),
        (lambda s: s["proved"].update(claims=0), "verdict: what was proved in epoch 1 of p2r1s0t0"),
    ],
)
def test_one_place_without_its_verdict_is_no_proved_run(bundle: Path, alter: Any, words: str) -> None:
    """The second replica's worker signs it so, with its own key; the first replica's verdicts all stand."""
    good = read_bundle(bundle, lambda policy: True)
    at = next(number for number, worker in enumerate(good.workers) if worker.coord == Coord(1, 2, 0, 0))
    worker = good.workers[at]
    signed, _ = worker.roots[1]
    changed = json.loads(canonical(signed.statement))
    alter(changed)
    false = replace(signed, statement=changed), RootStatement.from_json(changed)
    other = replace(worker, roots=[worker.roots[0], false, *worker.roots[2:]])
    with pytest.raises(VerificationError, match=words):
        cross_signatures.check_histories(replace(good, workers=[*good.workers[:at], other, *good.workers[at + 1 :]]))
    data = json.loads(bundle.read_bytes())
    alter(data["workers"][at]["roots"][1]["statement"])
    forged = bundle.with_name("forged.json")
    forged.write_bytes(canonical(data))
    assert standalone_verify.main([str(forged)]) not in (0, 3)


@pytest.mark.slow  # three launches of six workers
def test_a_lie_at_one_replica_ends_both_in_all_parties_and_the_attempt_everywhere(
    forker: Forker, tmp_path: Path
) -> None:
    fleet = _fleet(tmp_path / "fleet", forker)
    assert set(_run(fleet, "stands_by_an_altered_product").values()) == {3}, fleet.logs()
    for c in fleet.coords:
        assert _losses(fleet, c) == 2, "a loss of the step was told"
        assert max(_roots(fleet, c)) == 1, "the epoch was finalised"
        (failed,) = fleet.events(c, "proof_failed")
        assert failed["step"] == 2
        if c.party != LIAR.party:
            assert f"P{LIAR.party}" in failed["pair"]
        told = str(fleet.exit(c)["error"])
        assert "proof" in told
        assert (f"r{LIAR.replica}s0t0" in told) == (c.replica != LIAR.replica), "a sister says at which place"
        assert {int(p.name.split("-")[1]) for p in (fleet.dir(c) / "checkpoints").glob("step-*")} <= {1, 2}
    # no place goes on with the attempt, those that heard of it from a sister included
    assert set(_run(fleet, resume=True).values()) == {2}
    for c in fleet.coords:
        assert "a proof of attempt 0 did not hold" in fleet.exit(c)["error"]
    # the next one goes on from the last checkpoint that all places proved
    assert set(_run(fleet, resume=True, attempt=1).values()) == {0}, fleet.logs()
    assert {_losses(fleet, c) for c in fleet.coords if fleet.lead(c)} == {JOB.steps}
    assert fleet.verified(tmp_path / "out").claims > 0


@pytest.mark.ci("tests/engine/proofs/test_proved_replicas.py")
@pytest.mark.parametrize("checkpoint_every", [4, 3])
def test_a_lie_in_a_silent_step_at_one_replica_ends_both_before_the_next_opening_and_checkpoint(
    checkpoint_every: int, forker: Forker, tmp_path: Path
) -> None:
    """Steps 1 and 2 open nothing, and the liar lies in step 2; a checkpoint is due right behind it, or not."""
    job = replace(JOB, steps=4, loss_every=3, reveal=("loss",), checkpoint_every=checkpoint_every)
    fleet = _fleet(tmp_path / "fleet", forker, job)
    assert set(_run(fleet, "stands_by_an_altered_product").values()) == {3}, fleet.logs()
    for c in fleet.coords:
        assert _losses(fleet, c) == 1, "a loss was told after the lie"
        (failed,) = fleet.events(c, "proof_failed")
        assert failed["step"] == 2
        told = str(fleet.exit(c)["error"])
        assert (f"r{LIAR.replica}s0t0" in told) == (c.replica != LIAR.replica), "a sister says at which place"
        if c.party != LIAR.party:
            assert f"P{LIAR.party}" in failed["pair"]
        assert not list((fleet.dir(c) / "checkpoints").glob("step-*"))
    judge = Coord(LIAR.replica, (LIAR.party + 1) % 3, 0, 0)
    assert max(_roots(fleet, judge)) == 1, "who judges the liar signed the step"


@pytest.mark.slow  # two launches of six workers
def test_a_run_goes_on_with_the_proofs_of_every_place_as_if_nothing_had_been(
    whole: Fleet, forker: Forker, tmp_path: Path
) -> None:
    fleet = _fleet(tmp_path / "fleet", forker)
    assert 0 not in _run(fleet, "dies_in_an_epoch").values()
    assert set(_run(fleet, resume=True).values()) == {0}, fleet.logs()
    for c in fleet.coords:
        assert _roots(fleet, c) == _roots(whole, c)
    found, wanted = fleet.verified(tmp_path / "out"), whole.verified(tmp_path / "wanted")
    assert (found.run_root, found.claims) == (wanted.run_root, wanted.claims)
