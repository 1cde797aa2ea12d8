"""The form of the messages: three parties that sign epochs with less in them than the agreed program sends are refused.

Every case is a bundle that all three signed and that holds but for its form, before both verifiers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.bench.work.rehearsal import Rehearsal, exchange, rehearse
from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.private_job import DEFAULTS
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.model.definition.specs import MODELS
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.proof import standalone_verify
from uvcc_engine.transcript.proof.form import SHIPPED, dense_layers, floors
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signing.sshsig import write_allowed_signers
from uvcc_engine.transcript.terms.policy import Policy

MODEL = {"classes": 2, "features": 3, "layers": [
    {"type": "dense", "inputs": 3, "outputs": 4}, {"type": "relu", "width": 4},
    {"type": "dense", "inputs": 4, "outputs": 2},
]}  # fmt: skip
JOB = {"model": MODEL, "batch": 8, "test_rows": 10, "reveal": ["loss", "accuracy"], "loss_every": 2}
STEPS = 3
FORWARD, WEIGHTS, TESTED = 8 * 8 * (4 + 2), 8 * (4 * 4 + 5 * 2), 8 * 10 * (4 + 2)
Sizes = Callable[[int, int], Mapping[int, list[int]]]


def program(epoch: int, replica: int) -> dict[int, list[int]]:
    """The least that a party sends or receives: sizes by kind."""
    due = [FORWARD + WEIGHTS - 8, 4] if epoch < STEPS else [TESTED - 8, 4]
    return {kinds.RESHARE: due, **({kinds.OPEN: [4]} if epoch != 1 else {kinds.DEALER: [4]})}


def less(what: Mapping[int, list[int]], *, at: int = 1, replica: int = 0) -> Sizes:
    """The program, but for one epoch of one replica."""
    return lambda e, r: what if (e, r) == (at, replica) else program(e, r)


def signed(folder: Path, sizes: Sizes, *, replicas: int = 1, **job: Any) -> Rehearsal:
    """A bundle of three parties that sent each other just that."""

    def traffic(workers: Mapping[int, Any], epoch: int, *, seed: str, ops: int) -> None:
        replica = workers[0].coord.replica
        for kind, of_kind in sizes(epoch, replica).items():
            for op, size in enumerate(of_kind):
                for src, dst in ((0, 1), (2, 0)):  # P1 and P2 have one end of it, P0 has two
                    tag = (epoch, kind, op, kind)
                    workers[src].recorder.record(0, dst, tag, bytes(size))
                    workers[dst].recorder.record(1, src, tag, bytes(size))

    return rehearse(folder, topology=Topology(replicas), steps=STEPS, traffic=traffic, job={**JOB, **job})


def judged(made: Rehearsal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What does not hold, to both verifiers alike; "" if all does."""
    keys = {f"P{p}": identity.public.ed25519 for p, identity in enumerate(made.identities)}
    signers = tmp_path / "signers"
    write_allowed_signers(signers, keys)
    try:
        found = verify(made.bundle, allowed_signers=keys)
        said = "" if not found.warnings[1:] else "; ".join(found.warnings)
    except VerificationError as e:
        said = e.what
    code = standalone_verify.main([str(made.bundle), "--allowed-signers", str(signers)])
    told = capsys.readouterr()
    assert code == (1 if said.startswith("form:") else 0), (said, told)
    assert ("the form was not checked" in told.out) == ("form of the messages was not checked" in said)
    return said


def test_the_least_that_the_program_sends_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(signed(tmp_path / "run", program), tmp_path, capsys) == ""


LAZY = [
    ({}, 1, "0 RESHARE messages, the agreed program takes at least 2"),
    ({kinds.RESHARE: [5000], kinds.OPEN: [4]}, 0, "P1 of replica 0 has 1 RESHARE messages"),
    ({kinds.DEALER: [5000, 5000]}, 1, "0 RESHARE messages"),
    ({kinds.RESHARE: [8, 8]}, 1, f"32 bytes of messages, the agreed program takes at least {FORWARD + WEIGHTS}"),
    ({kinds.RESHARE: [FORWARD, WEIGHTS - 1]}, 1, f"{FORWARD + WEIGHTS - 1} bytes"),
    ({kinds.RESHARE: [FORWARD, WEIGHTS]}, 2, "0 OPEN messages"),
    ({}, 3, "0 RESHARE messages"),
    ({kinds.RESHARE: [4, TESTED - 9], kinds.OPEN: [4]}, 3, f"{TESTED - 1} bytes"),
    ({kinds.RESHARE: [8, TESTED - 8]}, 3, "0 OPEN messages"),
]


@pytest.mark.parametrize(("sent", "epoch", "what"), LAZY)
def test_lazy_epochs_that_all_three_signed_are_refused(
    sent: dict[int, list[int]], epoch: int, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = judged(signed(tmp_path / "run", less(sent, at=epoch)), tmp_path, capsys)
    assert said.startswith(f"form: epoch {epoch}: P")
    assert what in said


def test_each_replica_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What one replica sends does not stand for another; only what is opened is opened once for all of them."""
    quiet = {kinds.RESHARE: [FORWARD, WEIGHTS]}
    assert judged(signed(tmp_path / "a", less(quiet, at=2, replica=1), replicas=2), tmp_path, capsys) == ""
    said = judged(signed(tmp_path / "b", less({}, at=2, replica=1), replicas=2), tmp_path, capsys)
    assert "epoch 2: P0 of replica 1 has 0 RESHARE" in said


def test_queries_change_no_weights_and_the_last_may_be_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answers(epoch: int, replica: int) -> dict[int, list[int]]:
        return {kinds.RESHARE: [FORWARD - 8, 8]} if epoch < STEPS - 1 else {kinds.RESHARE: [40, 8]}

    job = {"task": "infer", "reveal": ["predictions"]}
    assert judged(signed(tmp_path / "a", answers, **job), tmp_path, capsys) == ""
    fewer = signed(tmp_path / "b", lambda e, r: {kinds.RESHARE: [FORWARD - 9, 8]} if e == 0 else answers(e, r), **job)
    assert f"{FORWARD - 1} bytes" in judged(fewer, tmp_path, capsys)


def test_a_batch_that_is_served_may_be_of_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = {"task": "serve", "reveal": ["answers"]}
    one = FORWARD // JOB["batch"]
    assert judged(signed(tmp_path / "a", lambda e, r: {kinds.RESHARE: [one - 8, 8]}, **job), tmp_path, capsys) == ""
    fewer = signed(tmp_path / "b", lambda e, r: {kinds.RESHARE: [one - 8, 8 if e else 7]}, **job)
    assert f"{one - 1} bytes" in judged(fewer, tmp_path, capsys)


def test_a_policy_that_names_no_model_is_said_to_have_no_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = rehearse(tmp_path / "run", steps=1, ops=1, traffic=exchange)
    assert "the form of the messages was not checked" in judged(made, tmp_path, capsys)


def test_the_widths_of_shipped_models_are_theirs() -> None:
    assert set(SHIPPED) == set(MODELS)
    assert {name: tuple(map(int, text.split())) for name, text in standalone_verify.SHIPPED.items()} == SHIPPED
    for name, model in MODELS.items():
        has = [(spec.inputs, spec.outputs) for spec in model.weights if isinstance(spec, Dense)]
        for layer in itertools.pairwise(SHIPPED[name]):
            has.remove(layer)  # a layer that stands twice is there twice


@pytest.mark.parametrize("model", [
    MODEL, "mlp-digits", "own.py:Net", [], {"layers": [{"type": "dense", "inputs": -1, "outputs": True}]},
    {"a": [{"type": "residual", "layers": [{"type": "dense", "inputs": 7, "outputs": 9}]}]}, None, 3,
    '{"layers": [{"type": "dense", "inputs": 5, "outputs": 6}]}',
])  # fmt: skip
def test_both_verifiers_read_a_model_alike(model: Any) -> None:
    assert sorted(map(tuple, standalone_verify.dense_layers(model))) == sorted(dense_layers(model))


def test_sizes_that_are_none_are_refused(make_policy: Callable[..., Policy]) -> None:
    for wrong in ({"batch": 0}, {"batch": "8"}, {"batch": True}, {"test_rows": -1}):
        policy = make_policy(job={"kind": "private", "steps": 3, **JOB, **wrong})
        with pytest.raises(ConfigError, match="no number of rows"):
            floors(policy, 3)
        with pytest.raises(standalone_verify.Unreadable, match="batch or test_rows"):
            standalone_verify.Policy(policy.to_json())


def test_a_job_that_says_nothing_of_what_it_reveals_means_what_a_worker_then_reveals(
    make_policy: Callable[..., Policy],
) -> None:
    job = {"kind": "private", "steps": 3, **JOB}
    del job["reveal"]
    silent, spoken = make_policy(job=job), make_policy(job=job | {"reveal": list(DEFAULTS.reveal)})
    assert [silent.step_values(e) for e in range(4)] == [spoken.step_values(e) for e in range(4)] != [()] * 4
    assert floors(silent, 4) == floors(spoken, 4) != floors(make_policy(job=job | {"reveal": ["loss"]}), 4)
    read = [standalone_verify.Policy(p.to_json()) for p in (silent, spoken)]
    assert read[0].listed == read[1].listed
