"""Steps that open nothing, by workers as real processes: their verdicts go with the votes of the next step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES, Fleet, Zygote, direct_links
from private_liars import LIMITS
from test_private_proofs import LIAR, _collected, _run
from test_private_worker import halt, until

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.run_files.control import HALT, HOLD
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.owner import program_form
from uvcc_engine.owner.audit import audit
from uvcc_engine.owner.client import write_shared
from uvcc_engine.proofs.settling import VERDICT_BYTES
from uvcc_engine.sealing.inputs import SharedInputs, encode_fixed, share_dataset, share_tensors
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sharding.validation import QUERY
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import Leaf
from uvcc_engine.transcript.proof import standalone_verify
from uvcc_engine.transcript.proof.verifier import verify as verify_folder
from uvcc_engine.transcript.signed import proof_findings

pytestmark = pytest.mark.ci("tests/engine/proofs/test_owed_verdicts.py")
NET = sorted_json(model_to_json(model_of_list([{"linear": 2}, "relu", "linear"], 3, 2)))
JOB = PrivateJob(
    model=NET,
    steps=5,
    batch=4,
    loss_every=3,
    checkpoint_every=5,
    test_rows=4,
    verify="products",
    reveal=("loss", "seeds"),
)
"""Steps 1 and 2 open nothing; a liar lies in step 2, and step 3 opens its loss."""
SILENT = (1, 2)


def _shared(job: PrivateJob = JOB) -> SharedInputs:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    y = (x[:, 0] > 0).astype(np.int64)
    purpose = Purpose.of(job, [OWNER.public.x25519])
    data, publics = Dataset(x[:12], y[:12], x[12:], y[12:], 2), tuple(p.public for p in PARTIES)
    return share_dataset(data, 16, publics, OWNER, seed=1, purpose=purpose)


def _fleet(folder: Path, zygote: Zygote, job: PrivateJob = JOB) -> Fleet:
    return Fleet(folder, zygote, job, direct_links(), _shared(job))


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    fleet = _fleet(tmp_path_factory.mktemp("whole"), zygote)
    assert _run(fleet, zygote) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    return fleet


@pytest.fixture(scope="module")
def bundle(whole: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _collected(whole, tmp_path_factory.mktemp("bundle"))


def test_a_run_with_silent_steps_ends_verified_by_both_verifiers_and_has_the_program_s_form(bundle: Path) -> None:
    certificate = verify_folder(bundle, allowed_signers=bundle / "allowed_signers")
    assert certificate.word == "VERIFIED"
    assert "not proved" not in certificate.text().split("every product")[0]
    words = [str(bundle / "proof_bundle.json"), "--allowed-signers", str(bundle / "allowed_signers")]
    assert standalone_verify.main(words) == 0
    assert program_form.check(bundle).epochs == JOB.steps + 1


def test_a_silent_step_has_its_proof_in_its_epoch_and_its_verdict_in_the_three_signed_roots(bundle: Path) -> None:
    stated = [
        [s["statement"] for s in w["roots"]] for w in json.loads((bundle / "proof_bundle.json").read_bytes())["workers"]
    ]
    for epoch in SILENT:
        assert all(of_party[epoch]["values"] == {} for of_party in stated)
        assert len({str(of_party[epoch]["proved"]) for of_party in stated}) == 1
        assert stated[0][epoch]["proved"]["claims"] > 0
    for file, block in leaf_file.blocks(bundle / "p0r0" / "transcript_p0r0s0t0" / leaf_file.LEAVES):
        leaves = [Leaf.unpack(record) for record in leaf_file.records(file, block)]
        if block.epoch in SILENT:
            assert {kinds.PROOF, kinds.COIN} <= {leaf.kind for leaf in leaves}
            assert not [leaf for leaf in leaves if leaf.size == VERDICT_BYTES]


def test_the_owner_who_gets_the_seeds_replays_silent_steps(whole: Fleet, tmp_path: Path) -> None:
    write_shared(_shared(), tmp_path / "sealed")
    replayed = audit(whole.folder, OWNER, tmp_path / "sealed", whole.home(0) / "policy.json")
    assert (replayed.parties, replayed.epochs) == ((), JOB.steps), "nothing is measured in a last epoch"


@pytest.mark.parametrize("checkpoint_every", [5, 3])
def test_a_lie_in_a_silent_step_ends_all_parties_before_the_next_opening_and_the_next_checkpoint(
    checkpoint_every: int, zygote: Zygote, tmp_path: Path
) -> None:
    """The next opening is in the next step; where a checkpoint is due right behind the silent one, it is not taken."""
    fleet = _fleet(tmp_path, zygote, replace(JOB, checkpoint_every=checkpoint_every))
    assert _run(fleet, zygote, "stands_by_an_altered_product") == [3, 3, 3], [fleet.exit(p) for p in range(3)]
    judge = (LIAR + 1) % 3
    assert max(fleet.roots(judge)) == 1, "who judges the liar signed the step"
    for party in range(3):
        assert len(fleet.csv(party)) == 1 + 1, "a loss was revealed after the lie"
        (failed,) = fleet.events(party, "proof_failed")
        assert failed["step"] == 2
        assert not list((fleet.dir(party) / "checkpoints").glob("step-*"))
        left = proof_findings.read(fleet.dir(party) / f"finding_p{party}r0s0t0.json")
        (found,) = proof_findings.concluded(left)
        assert (found.open_to, found.epoch) == ((LIAR,), 2)
        if party != LIAR:
            assert f"P{LIAR}" in failed["pair"]
            assert failed["named"] == f"P{LIAR}"
    assert _run(fleet, zygote, resume=True) == [2, 2, 2], "nobody goes on with the attempt"
    assert _run(fleet, zygote, resume=True, attempt=1) == [0, 0, 0], [fleet.exit(p) for p in range(3)]


def test_the_same_lie_goes_through_where_nobody_hears_the_verdicts(zygote: Zygote, tmp_path: Path) -> None:
    """So the test above can fail."""
    fleet = _fleet(tmp_path, zygote, replace(JOB, verify="off"))
    assert _run(fleet, zygote, "stands_by_an_altered_product") == [0, 0, 0]


def test_who_withholds_the_verdict_of_a_silent_step_is_named_within_the_limit_of_a_proof(
    zygote: Zygote, tmp_path: Path
) -> None:
    fleet = _fleet(tmp_path, zygote)
    for link in fleet.links:
        link |= LIMITS
    assert 0 not in _run(fleet, zygote, "withholds_the_vote_that_its_verdict_goes_with")
    said = [str(fleet.exit(p)["error"]) for p in (0, 2)]
    assert any(f"party {LIAR} is alive and withholds its verdict of a proof for 500 s" in text for text in said), said
    assert all(len(fleet.csv(party)) == 1 + 1 for party in range(3))


def test_a_run_that_ended_in_a_silent_step_goes_on_and_has_the_same_roots(
    whole: Fleet, zygote: Zygote, tmp_path: Path
) -> None:
    fleet = _fleet(tmp_path, zygote)
    _run(fleet, zygote, "dies_in_an_epoch")
    assert _run(fleet, zygote, resume=True) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert fleet.roots(0) == whole.roots(0)


@pytest.mark.parametrize("verify", ["proofs", "covert"])
def test_every_message_proved_or_audited_by_chance_goes_without_a_verdict_s_round_as_well(
    verify: str, zygote: Zygote, tmp_path: Path
) -> None:
    job = replace(JOB, verify=verify, audit_one_in=2 if verify == "covert" else JOB.audit_one_in)
    fleet = _fleet(tmp_path, zygote, job)
    assert _run(fleet, zygote) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    bundle = _collected(fleet, tmp_path / "bundle")
    assert verify_folder(bundle, allowed_signers=bundle / "allowed_signers").word == "VERIFIED"
    for file, block in leaf_file.blocks(bundle / "p2r0" / "transcript_p2r0s0t0" / leaf_file.LEAVES):
        if block.epoch in SILENT:
            assert not [r for r in leaf_file.records(file, block) if Leaf.unpack(r).size == VERDICT_BYTES]


def test_a_run_that_is_held_and_halted_behind_a_silent_step_hears_its_verdicts_first(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Of queries, every step is silent: what a checkpoint holds was agreed on, and the run goes on from it."""
    job = replace(JOB, task="infer", steps=3, reveal=("predictions",), checkpoint_every=9)
    tensors: dict[str, Any] = {}
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    for name, values in {QUERY: rows, "weight.0": np.eye(4, 2), "weight.1": np.eye(3, 2)}.items():
        tensors[name] = encode_fixed(name, values, 16)
    publics, purpose = tuple(p.public for p in PARTIES), Purpose.of(job, [OWNER.public.x25519])
    shared = share_tensors(tensors, 16, publics, OWNER, seed=1, purpose=purpose)
    fleets = [Fleet(tmp_path / name, zygote, job, direct_links(), shared) for name in ("whole", "halted")]
    assert _run(fleets[0], zygote) == [0, 0, 0], [fleets[0].exit(p) for p in range(3)]
    fleets[1].launch(halt=HOLD)
    until(lambda: fleets[1].events(0, "held"), 500, "the hold")
    halt(fleets[1], 0, HALT, "stop")
    assert fleets[1].wait() == [0, 0, 0], [fleets[1].exit(p) for p in range(3)]
    assert [fleets[1].exit(p)["status"] for p in range(3)] == ["halted"] * 3
    fleets[1].launch(resume=True)
    assert fleets[1].wait() == [0, 0, 0], [fleets[1].exit(p) for p in range(3)]
    assert [fleets[1].exit(p)["status"] for p in range(3)] == ["done"] * 3
    assert fleets[1].roots(0) == fleets[0].roots(0)
