"""A job that is proved, by workers as real processes: it ends verified, and a lie ends it unrevealed."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES, Fleet, Zygote, direct_links
from private_liars import LIMITS, WITHHOLDS

from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.proof_mode import Proving
from uvcc_engine.contract.parsing.canonical import canonical, sorted_json
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.owner import program_form
from uvcc_engine.owner.audit import audit
from uvcc_engine.owner.client import write_shared
from uvcc_engine.sealing.inputs import SharedInputs, encode_fixed, share_dataset, share_tensors
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sealing.release import box_name, open_weights
from uvcc_engine.sharding.validation import QUERY, fit_model
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import Leaf
from uvcc_engine.transcript.proof import standalone_verify
from uvcc_engine.transcript.proof.bundle import assemble_folder
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signed import proof_findings
from uvcc_engine.transcript.signing.sshsig import NAMESPACES

LIAR = 1
NET = sorted_json(model_to_json(model_of_list([{"linear": 2}, "relu", "linear"], 3, 2)))
JOB = PrivateJob(model=NET, steps=3, batch=4, checkpoint_every=2, test_rows=4, verify="products")


def _rows() -> Dataset:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    y = (x[:, 0] > 0).astype(np.int64)
    return Dataset(x[:12], y[:12], x[12:], y[12:], 2)


def _shared(job: PrivateJob) -> SharedInputs:
    purpose = Purpose.of(job, [OWNER.public.x25519])
    return share_dataset(_rows(), job.frac_bits, tuple(p.public for p in PARTIES), OWNER, seed=1, purpose=purpose)


def _fleet(folder: Path, zygote: Zygote, job: PrivateJob = JOB) -> Fleet:
    return Fleet(folder, zygote, job, direct_links(), _shared(job))


def _run(fleet: Fleet, zygote: Zygote, lie: str = "", **changes: Any) -> list[int]:
    fleet.pids = []
    for party in range(3):
        fleet.dir(party).mkdir(exist_ok=True)
        spec = fleet.spec(party, **changes).to_json()
        request = {"spec": spec, "log": str(fleet.home(party) / "worker.log")}
        if lie and party == LIAR:
            request["lie"] = lie
        elif lie.startswith(WITHHOLDS):
            request["lie"] = "gives_up"
        fleet.pids.append(zygote.ask(request)["pid"])
    return fleet.wait()


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    fleet = _fleet(tmp_path_factory.mktemp("whole"), zygote)
    assert _run(fleet, zygote) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    return fleet


@pytest.fixture(scope="module")
def bundle(whole: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is collected: bundle, signers, transcripts."""
    return _collected(whole, tmp_path_factory.mktemp("bundle"))


def _collected(whole: Fleet, root: Path) -> Path:
    for party in range(3):
        source = whole.dir(party) / f"transcript_p{party}r0s0t0"
        target = root / f"p{party}r0" / source.name
        target.mkdir(parents=True)
        for file in source.iterdir():
            if file.name in ("leaves.bin", "roots.jsonl", "openings.jsonl", "peers.jsonl", "result.json"):
                (target / file.name).write_bytes(file.read_bytes())
    for name, there in (("policy.json", "policy.json"), ("policy_signatures.json", "signatures.json")):
        (root / name).write_bytes((whole.home(0) / there).read_bytes())
    signers = "".join(f'P{i} namespaces="{",".join(NAMESPACES)}" {p.public.ed25519}\n' for i, p in enumerate(PARTIES))
    (root / "allowed_signers").write_text(signers)
    assemble_folder(root)
    return root


def test_a_proved_run_ends_verified_by_both_verifiers(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate = verify(bundle, allowed_signers=bundle / "allowed_signers")
    assert certificate.word == "VERIFIED"
    assert certificate.verify == "products"
    assert certificate.claims > JOB.steps
    text = certificate.text()
    assert "not proved: comparisons" in text
    assert "2^-40" in text
    words = [str(bundle / "proof_bundle.json"), "--allowed-signers", str(bundle / "allowed_signers")]
    assert standalone_verify.main(words) == 0
    assert "not proved: comparisons" in capsys.readouterr().out


@pytest.mark.ci(__file__)
def test_a_run_with_every_message_proved_ends_verified_by_both_verifiers(
    zygote: Zygote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By Adam on squared errors, with a norm that is cut. Its leaves have the form that the program gives them, every
    root statement of every epoch has its verdict, and the owner who gets the seeds replays it, its proofs included."""
    (tmp_path / "run").mkdir()
    learning: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "clip_norm": 0.5, "objective": "mse"}
    job = replace(JOB, verify="proofs", steps=1, reveal=("loss", "accuracy", "overflow", "seeds"), **learning)
    fleet = _fleet(tmp_path / "run", zygote, job)
    assert _run(fleet, zygote) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    (tmp_path / "bundle").mkdir()
    bundle = _collected(fleet, tmp_path / "bundle")
    for party in range(3):  # in the worker's own words: a count is 0.0 there, and 0 where it is signed
        shutil.copy(fleet.dir(party) / "result.json", bundle / f"p{party}r0" / "result.json")
    assert '"overflow":0.0' in (bundle / "p0r0" / "result.json").read_text()
    certificate = verify(bundle, allowed_signers=bundle / "allowed_signers")
    assert certificate.word == "VERIFIED"
    assert certificate.verify == "proofs"
    assert certificate.claims > 400 * job.steps
    assert "every message between the domains is proved" in certificate.text()
    assert "not proved" not in certificate.text()
    words = [str(bundle / "proof_bundle.json"), "--allowed-signers", str(bundle / "allowed_signers")]
    assert standalone_verify.main(words) == 0
    assert "every message between them was proved" in capsys.readouterr().out
    assert program_form.check(bundle).epochs == job.steps + 1
    write_shared(_shared(job), tmp_path / "sealed")
    replayed = audit(fleet.folder, OWNER, tmp_path / "sealed", fleet.home(0) / "policy.json")
    assert (replayed.parties, replayed.epochs) == ((), job.steps + 1)


@pytest.mark.ci(__file__)
def test_an_inference_with_every_message_proved_ends_verified_by_both_verifiers(zygote: Zygote, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    job = replace(JOB, verify="proofs", task="infer", steps=2, reveal=("predictions",))
    rows, tensors = _rows().train_x[:8], {}
    for name, values in {QUERY: rows, "weight.0": np.eye(4, 2), "weight.1": np.eye(3, 2)}.items():
        tensors[name] = encode_fixed(name, values, 16)
    purpose = Purpose.of(job, [OWNER.public.x25519])
    shared = share_tensors(tensors, 16, tuple(p.public for p in PARTIES), OWNER, seed=1, purpose=purpose)
    fleet = Fleet(tmp_path / "run", zygote, job, direct_links(), shared)
    assert _run(fleet, zygote) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    boxes = [(fleet.dir(p) / box_name(f"p{p}r0s0t0")).read_bytes() for p in range(3)]
    answers = open_weights(boxes, owner=OWNER, parties=tuple(p.public for p in PARTIES))["prediction"]
    logits = np.maximum(rows[:, :2], 0)
    told = np.abs(logits[:, 0] - logits[:, 1]) > 0.01  # where both are cut off, the last bit decides
    assert told.sum() > 4
    assert answers[told].argmax(1).tolist() == logits[told].argmax(1).tolist()
    (tmp_path / "bundle").mkdir()
    bundle = _collected(fleet, tmp_path / "bundle")
    certificate = verify(bundle, allowed_signers=bundle / "allowed_signers")
    assert (certificate.word, certificate.verify) == ("VERIFIED", "proofs")
    assert certificate.claims > 20 * job.steps
    words = [str(bundle / "proof_bundle.json"), "--allowed-signers", str(bundle / "allowed_signers")]
    assert standalone_verify.main(words) == 0


def test_every_epoch_has_its_proof_in_the_transcript_and_one_verdict_of_all(bundle: Path) -> None:
    found = json.loads((bundle / "proof_bundle.json").read_bytes())
    stated = [[s["statement"]["proved"] for s in w["roots"]] for w in found["workers"]]
    assert stated[0] == stated[1] == stated[2]
    assert len(stated[0]) == JOB.steps + 1
    assert len({v["coins"] for v in stated[0]}) == len(stated[0])
    for file, block in leaf_file.blocks(bundle / "p0r0" / "transcript_p0r0s0t0" / leaf_file.LEAVES):
        assert {kinds.PROOF, kinds.COIN} <= {Leaf.unpack(r).kind for r in leaf_file.records(file, block)}


@pytest.mark.parametrize("epochs", [1, pytest.param(JOB.steps + 1, marks=pytest.mark.ci(__file__))])
def test_every_message_of_every_proof_has_the_form_that_the_program_gives_it(bundle: Path, epochs: int) -> None:
    found = program_form.check(bundle, epochs % (JOB.steps + 1))
    assert (found.epochs, found.of) == (epochs, JOB.steps + 1)


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda s: s.pop("proved"), "verdict: whether epoch 1 of p0r0s0t0 states a proof"),
        (lambda s: s["proved"].update(claims=s["proved"]["claims"] + 1), "verdict: what was proved in epoch 1"),
        (lambda s: s["proved"].update(claims=0), "a proof of nothing"),
    ],
)
def test_a_verdict_that_one_party_signs_otherwise_is_refused(bundle: Path, alter: Any, words: str) -> None:
    """It signs with its own key; the check of verdicts comes on top of that of histories, which refuses it as well."""
    from uvcc_engine.transcript.proof import cross_signatures
    from uvcc_engine.transcript.proof.bundle import read_bundle
    from uvcc_engine.transcript.signed.statements import RootStatement

    good = read_bundle(bundle / "proof_bundle.json", lambda policy: True)
    for number, worker in enumerate(good.workers if "nothing" in words else good.workers[:1]):
        signed, statement = worker.roots[1]
        changed = json.loads(canonical(signed.statement))
        alter(changed)
        false = RootStatement.from_json(changed)
        roots = [*worker.roots[:1], (replace(signed, statement=changed), false), *worker.roots[2:]]
        workers = [*good.workers[:number], replace(worker, roots=roots), *good.workers[number + 1 :]]
        good = replace(good, workers=workers)
        assert statement.proved is not None
    with pytest.raises(VerificationError, match=words):
        cross_signatures.check_histories(good)


def test_an_altered_product_ends_the_step_in_all_parties_before_anything_is_revealed(
    zygote: Zygote, tmp_path: Path
) -> None:
    fleet = _fleet(tmp_path, zygote)
    assert _run(fleet, zygote, "stands_by_an_altered_product") == [3, 3, 3]
    for party in range(3):
        assert len(fleet.csv(party)) == 1 + 2, "a loss of the step was revealed"
        assert max(fleet.roots(party)) == 1, "the epoch was finalised"
        (failed,) = fleet.events(party, "proof_failed")
        assert failed["step"] == 2
        if party != LIAR:
            assert f"P{LIAR}" in failed["pair"]
            assert (failed["named"], failed["open_to"]) == (f"P{LIAR}", [f"P{LIAR}"])
            assert f"the second round names party {LIAR}" in fleet.exit(party)["error"]
        assert "proof" in fleet.exit(party)["error"]
        # what all three signed of it lies at each, and convicts the liar
        left = proof_findings.read(fleet.dir(party) / f"finding_p{party}r0s0t0.json")
        assert sorted(one.party for one in left) == [0, 1, 2]
        (found,) = proof_findings.concluded(left)
        assert (found.open_to, found.epoch, found.attempt) == ((LIAR,), 2, 0)
        assert {int(p.name.split("-")[1]) for p in (fleet.dir(party) / "checkpoints").glob("step-*")} <= {2}
    # the same attempt would repeat its masks over what the liar sends now, so no worker goes on with it
    assert _run(fleet, zygote, resume=True) == [2, 2, 2]
    for party in range(3):
        assert "a proof of attempt 0 did not hold" in fleet.exit(party)["error"]
        assert json.loads((fleet.dir(party) / f"least_attempt_p{party}r0s0t0.json").read_text()) == {"least": 1}
        assert len(fleet.csv(party)) == 1 + 2
    # the next attempt has other masks, and goes on from the last checkpoint that was proved
    assert _run(fleet, zygote, resume=True, attempt=1) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert all(len(fleet.csv(party)) == 1 + JOB.steps for party in range(3))


def test_the_same_lie_goes_through_where_nothing_is_proved(zygote: Zygote, tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, zygote, replace(JOB, verify="off"))
    assert _run(fleet, zygote, "stands_by_an_altered_product") == [0, 0, 0]


def test_a_party_that_proves_nothing_is_named_before_the_first_step(zygote: Zygote, tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, zygote)
    assert 0 not in _run(fleet, zygote, "proves_nothing")
    said = [str(fleet.exit(p)["error"]) for p in (0, 2)]
    assert any("P1 works with verify 'off', the policy says 'products'" in text for text in said), said
    assert not fleet.roots(0)


@pytest.mark.parametrize("lie", ["withholds_its_proof", "withholds_its_verdict"])
def test_a_withheld_proof_ends_within_the_limit_of_the_plane(lie: str, zygote: Zygote, tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, zygote)
    for link in fleet.links:
        link |= LIMITS
    assert 0 not in _run(fleet, zygote, lie)
    said = [str(fleet.exit(p)["error"]) for p in (0, 2)]
    assert any("party 1 is alive and withholds its part of a proof" in text for text in said), said
    assert max(fleet.roots(0)) == 1


@pytest.mark.ci(__file__)
def test_a_run_goes_on_from_its_last_proved_checkpoint(whole: Fleet, zygote: Zygote, tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, zygote)
    _run(fleet, zygote, "dies_in_an_epoch")
    assert _run(fleet, zygote, resume=True) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert fleet.roots(0) == whole.roots(0)


@pytest.mark.parametrize("verify", ["products", "proofs"])
@pytest.mark.parametrize(
    ("change", "size", "words"),
    [
        ({"task": "infer", "reveal": ("predictions",)}, 2, "task 'infer' on 2 workers"),
    ],
)
def test_what_cannot_be_proved_is_refused_by_name_before_it_begins(
    verify: Any, change: Any, size: int, words: str
) -> None:
    job = replace(PrivateJob(verify=verify), **change)
    with pytest.raises(ConfigError, match=words):
        fit_model(job, workers=size, tensor=size)


def test_every_combination_has_a_proof_or_is_refused_by_what_has_none() -> None:
    """Whatever is asked for together: the refusal names one of the things that have no proof, and nothing else is."""
    nets = ([{"linear": 2}, "relu"], [{"linear": 2}, {"sum": [["relu"], ["tanh"]]}])
    models = [sorted_json(model_to_json(model_of_list([*net, "linear"], 3, 2))) for net in nets]
    tasks = {"train": ("loss",), "infer": ("predictions",)}
    accepted = 0
    for mode, task, model, optimizer, device, workers in itertools.product(
        ("off", "products", "proofs", "covert"), tasks, models, ("sgd", "adam"), ("auto", "cuda"), (1, 2)
    ):
        job = replace(JOB, verify=mode, model=model, optimizer=optimizer, device=device)  # type: ignore[arg-type]
        job = replace(job, task=task, reveal=tasks[task])  # type: ignore[arg-type]
        odd = [f"{workers} workers"] if workers > 1 and task != "train" else []
        if mode == "off" or not odd:
            if workers == 1 or mode != "off":
                fit_model(job, workers=workers, replicas=workers)
                accepted += 1
            continue
        with pytest.raises(ConfigError) as refused:
            fit_model(job, workers=workers, replicas=workers)
        assert mode in refused.value.what or "workers" in refused.value.what
        assert any(word in refused.value.what for word in odd)
    assert accepted == 16 + 3 * (16 + 8)  # without proofs all of one worker; with them a training also of two


def test_a_mode_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError) as found:
        PrivateJob(verify="all")  # type: ignore[arg-type]
    assert "give off, products, proofs, covert" in found.value.hint


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"verify": "covert", "audit_one_in": 1}, "job.audit_one_in is 1"),
        ({"verify": "covert", "audit_one_in": 101}, "job.audit_one_in is 101"),
        ({"verify": "covert", "audit_one_in": True}, "audit_one_in"),
        ({"verify": "covert", "audit_one_in": 2.5}, "audit_one_in"),
        ({"verify": "proofs", "audit_one_in": 5}, "job.audit_one_in is 5 with verify: proofs"),
    ],
)
def test_a_rate_of_audits_that_says_nothing_or_deters_nobody_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PrivateJob.from_json(keys)
    with pytest.raises(ConfigError, match=words):
        Proving.of_job(keys)
    assert PrivateJob.from_json({"verify": "covert"}).proving == Proving("covert", 10)


def test_a_worker_of_another_mode_than_the_policy_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, zygote)
    assert _run(fleet, zygote, job=replace(JOB, verify="off").to_json()) == [2, 2, 2]
    assert "verify 'off', the signed policy 'products'" in fleet.exit(0)["error"]
