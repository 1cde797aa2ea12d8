"""A private model answers private queries; several owners contribute; what does not fit is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES, Fleet, Zygote, direct_links

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError, ProofFailedError, UvccError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset, Floats, load_digits
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.plaintext import forward, train_plaintext
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.owner import client
from uvcc_engine.sealing.inputs import SharedInputs, encode_fixed, share_dataset, share_tensors
from uvcc_engine.sealing.joint import combine, open_set
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sealing.release import box_name, open_weights
from uvcc_engine.sharding.validation import QUERY, check_tensors, fit_model, shapes_of
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.worker.inference import Predictor

torch.set_num_threads(1)
MODEL_OWNER = Identity(b"m" * 32, b"v" * 32)
PUBLIC = tuple(p.public for p in PARTIES)
QUERIES = 20
TREES = {"trees": {"count": 2, "depth": 2}}
JOB = PrivateJob(model="mlp-digits", task="infer", steps=3, batch=8, reveal=("predictions",))


@pytest.fixture(scope="module")
def weights() -> tuple[Floats, ...]:
    return train_plaintext(PrivateJob(steps=40), load_digits(7)).weights


def two_owners(weights: tuple[Floats, ...], job: PrivateJob = JOB, asked_for: Floats | None = None) -> SharedInputs:
    rows = load_digits(7).test_x[:QUERIES] if asked_for is None else asked_for
    queries = {QUERY: encode_fixed("queries", rows, 16)}
    model = {f"weight.{i}": encode_fixed(f"weight.{i}", w, 16) for i, w in enumerate(weights)}
    purpose = Purpose.of(job, [OWNER.public.x25519, MODEL_OWNER.public.x25519])
    asked = share_tensors(queries, 16, PUBLIC, OWNER, seed=1, purpose=purpose)
    return combine([asked, share_tensors(model, 16, PUBLIC, MODEL_OWNER, seed=1, purpose=purpose)])


def exact(weights: tuple[Floats, ...]) -> list[int]:
    x = torch.from_numpy(load_digits(7).test_x[:QUERIES])
    return forward(find_model("mlp-digits"), [torch.from_numpy(w) for w in weights], x).argmax(1).tolist()


def opened(made: SharedInputs, party: int) -> Any:
    return open_set(made.boxes[party], party=party, identity=PARTIES[party], **made.public())


def test_secret_weights_answer_secret_queries_and_resume_between_batches(weights: tuple[Floats, ...]) -> None:
    made = two_owners(weights)

    def body(rt: Runtime) -> Predictor:
        predictor = Predictor(rt, JOB, find_model(JOB.model), opened(made, rt.party))
        for step in range(JOB.steps):
            rt.begin_epoch(step)
            assert predictor.step(step).loss is None
            again = Predictor(rt, JOB, find_model(JOB.model), opened(made, rt.party))
            again.load_state(predictor.state())
            predictor = again
        return predictor

    parts = LocalPlanes(3).run_three(body)
    rings = [p.weight_halves()[0]["prediction"] for p in parts]
    answers = (rings[0] + rings[1] + rings[2]) / 2.0**16
    assert np.array_equal(answers.sum(1), np.ones(QUERIES))
    assert answers.argmax(1).tolist() == exact(weights)
    assert parts[0].component_digest("second", b"b") == parts[1].component_digest("first", b"b")


@pytest.mark.parametrize("verify", ["products", "proofs"])
def test_answers_are_proved_before_there_are_any(verify: Any, weights: tuple[Floats, ...]) -> None:
    """They are those of an unproved model; a party that alters a product of the second batch gets no third answered."""
    made, job = two_owners(weights), replace(JOB, verify=verify, batch=4)

    def body(rt: Runtime) -> tuple[Any, ...]:
        inputs = opened(made, rt.party)
        predictor = Predictor(rt, job, find_model(job.model), inputs)
        rt.begin_epoch(0)
        proved = predictor.step(0).proved
        assert proved is not None
        assert proved.claims > 0
        first = predictor.weight_halves()[0]["prediction"]
        rt.begin_epoch(1)
        if rt.party == 1:
            inputs.tensors["weight.0"][0][0, 0] += 1 << 20  # the memory of the weights themselves
        try:
            predictor.step(1)
        except ProofFailedError as refused:
            return first, predictor.weight_halves()[0]["prediction"], refused.pair
        return first, None, ()

    parts = LocalPlanes(3).run_three(body)
    answers = sum(p[0] for p in parts) / 2.0**16
    assert answers[:4].argmax(1).tolist() == exact(weights)[:4]
    assert all(np.array_equal(first, second) for first, second, _ in parts), "an unproved answer was kept"
    assert all(1 in pair for _, _, pair in (parts[0], parts[2]))


def test_real_workers_answer_and_only_the_querying_owner_reads(
    tmp_path: Path, zygote: Zygote, weights: tuple[Floats, ...]
) -> None:
    fleet = Fleet(tmp_path, zygote, JOB, direct_links(), two_owners(weights))
    fleet.launch()
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    boxes = [(fleet.dir(p) / box_name(f"p{p}r0s0t0")).read_bytes() for p in range(3)]
    answers = open_weights(boxes, owner=OWNER, parties=PUBLIC)
    assert answers["prediction"].argmax(1).tolist() == exact(weights)
    with pytest.raises(UvccError):
        open_weights(boxes, owner=MODEL_OWNER, parties=PUBLIC)


def halves(data: Dataset) -> list[Dataset]:
    """The data as two owners would hold it."""
    return [
        Dataset(data.train_x[k::2], data.train_y[k::2], data.test_x[k::2], data.test_y[k::2], data.classes)
        for k in range(2)
    ]


@pytest.mark.parametrize(("objective", "layers"), [("binary", ["linear"]), ("mse", [TREES]), ("binary", [TREES])])
def test_a_model_of_one_output_answers_with_a_class_or_a_number(objective: str, layers: list[Any]) -> None:
    bits = np.random.default_rng(3).integers(0, 2, (QUERIES, 6)).astype(float)
    truth = bits[:, 0] if objective == "binary" else bits @ np.arange(1.0, 7.0) - 10.5
    fit = simulate.fit(
        layers,
        bits,
        truth.astype(int) if objective == "binary" else truth,
        objective=objective,
        steps=2,
        batch=QUERIES,
        momentum=0.0,
        schedule="constant",
        test=(bits, truth),
        reveal=["loss"],
    )
    job = replace(JOB, model=fit.job.model, objective=objective)
    wanted = fit.outputs(bits)[:, 0]
    made = two_owners(fit.weights, job, bits)

    def body(rt: Runtime) -> Predictor:
        predictor = Predictor(rt, job, fit_model(job), opened(made, rt.party))
        for step in range(job.steps):
            rt.begin_epoch(step)
            predictor.step(step)
        return predictor

    rings = [p.weight_halves()[0]["prediction"] for p in LocalPlanes(3).run_three(body)]
    answers = (rings[0] + rings[1] + rings[2])[:, 0] / 2.0**16
    assert np.abs(answers - (wanted > 0.0 if objective == "binary" else wanted)).max() < 1e-3
    assert len(np.unique(answers)) > 1


def test_trees_of_several_classes_answer_with_the_likeliest() -> None:
    bits = np.random.default_rng(3).integers(0, 2, (QUERIES, 6)).astype(float)
    truth = (bits[:, 0] + bits[:, 1]).astype(int)
    given = {"steps": 2, "batch": QUERIES, "momentum": 0.0, "schedule": "constant", "reveal": ["loss"]}
    fit = simulate.fit([TREES], bits, truth, test=(bits, truth), **given)
    made = two_owners(fit.weights, job := replace(JOB, model=fit.job.model), bits)

    def body(rt: Runtime) -> Predictor:
        predictor = Predictor(rt, job, fit_model(job), opened(made, rt.party))
        for step in range(job.steps):
            rt.begin_epoch(step)
            predictor.step(step)
        return predictor

    rings = [p.weight_halves()[0]["prediction"] for p in LocalPlanes(3).run_three(body)]
    answers = rings[0] + rings[1] + rings[2]
    assert answers.shape == (QUERIES, 3)
    assert (answers.argmax(1) == fit.predict(bits)).all()
    assert len(np.unique(answers.argmax(1))) > 1


@pytest.mark.parametrize("trees", [False, True])
def test_rows_of_two_owners_train_one_model(trees: bool) -> None:
    job, data = PrivateJob(steps=3, batch=16, test_rows=100), load_digits(7, 100)
    if trees:
        model = model_to_json(model_of_list([TREES], 64, 1))
        bits = {name: (getattr(data, name) > 0.5).astype(float) for name in ("train_x", "test_x")}
        data = replace(data, **bits, train_y=data.train_y % 2, test_y=data.test_y % 2, classes=1)
        told: dict[str, Any] = {"model": model, "objective": "binary", "lr": 0.3, "momentum": 0.0, "batch": 800}
        job = PrivateJob.from_json({"steps": 2, "test_rows": 100, "schedule": "constant", **told})
    parts = halves(data)
    owners = zip(parts, (OWNER, MODEL_OWNER), strict=True)
    made = combine([share_dataset(d, 16, PUBLIC, o, seed=1, job=job) for d, o in owners])
    stacked = [np.concatenate([getattr(d, n) for d in parts]) for n in ("train_x", "train_y", "test_x", "test_y")]
    together = Dataset(stacked[0], stacked[1], stacked[2], stacked[3], data.classes)

    def body(rt: Runtime) -> list[float | None]:
        trainer = trainer_of(rt, job, fit_model(job), opened(made, rt.party))
        found = []
        for step in range(job.steps):
            rt.begin_epoch(step)
            found.append(trainer.step(step).loss)
        return found

    losses = LocalPlanes(2).run_three(body)[0]
    assert np.allclose(losses, train_plaintext(job, together).losses, atol=1e-2)  # type: ignore[arg-type]


def test_a_set_binds_every_owner(weights: tuple[Floats, ...]) -> None:
    made = two_owners(weights)
    other = combine(
        [
            share_tensors({QUERY: encode_fixed("queries", np.zeros((4, 64)), 16)}, 16, PUBLIC, OWNER, seed=1),
            share_tensors({"weight.0": encode_fixed("w", weights[0], 16)}, 16, PUBLIC, MODEL_OWNER, seed=1),
        ]
    )
    with pytest.raises(VerificationError, match="set of owners"):
        open_set(other.boxes[0], party=0, identity=PARTIES[0], **made.public())
    with pytest.raises(UvccError, match="cannot be read"):
        open_set(made.boxes[0][:-5], party=0, identity=PARTIES[0], **made.public())
    with pytest.raises(ConfigError, match="owners"):
        combine([made, made])
    narrow = share_tensors({QUERY: encode_fixed("q", np.zeros((4, 8)), 16)}, 16, PUBLIC, MODEL_OWNER, seed=1)
    wide = share_tensors({QUERY: encode_fixed("q", np.zeros((4, 64)), 16)}, 16, PUBLIC, OWNER, seed=1)
    with pytest.raises(ConfigError, match=r"query_x of owner 1 .* has shape"):
        opened(combine([wide, narrow]), 0)
    coarse = share_tensors({"weight.0": encode_fixed("w", weights[0], 12)}, 12, PUBLIC, MODEL_OWNER, seed=1)
    with pytest.raises(ConfigError, match="12 fractional bits"):
        opened(combine([wide, coarse]), 0)


@pytest.mark.parametrize(
    ("change", "shapes", "words"),
    [
        ({}, {QUERY: (20, 63)}, r"query_x has shape \(20, 63\).*share other data"),
        ({}, {"weight.1": (33, 9)}, r"weight\.1 has shape \(33, 9\).*takes \(33, 10\)"),
        ({"steps": 2}, {}, "give steps: 3"),
    ],
)
def test_what_does_not_fit_is_refused_by_tensor(change: Any, shapes: Any, words: str) -> None:
    good = {QUERY: (20, 64), "weight.0": (65, 32), "weight.1": (33, 10)}
    check_tensors(good, JOB, fit_model(JOB))
    with pytest.raises(ConfigError, match=words):
        check_tensors(good | shapes, replace(JOB, **change), fit_model(JOB))


def test_a_job_that_its_model_or_fleet_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpt-tiny needs 14"):
        fit_model(PrivateJob(model="gpt-tiny", frac_bits=12))
    assert fit_model(PrivateJob(optimizer="adam"), workers=4).name == "mlp-digits"  # each worker keeps its moments
    assert fit_model(PrivateJob(model="lenet"), workers=2, tensor=2).name == "lenet"
    assert fit_model(PrivateJob(model="cnn-digits-norm"), workers=2, replicas=2).name == "cnn-digits-norm"
    assert fit_model(PrivateJob(model="cnn-digits-norm"), workers=2, tensor=2).name == "cnn-digits-norm"
    with pytest.raises(ConfigError, match=r"32 microbatches gives 2 tensor ranks 1 lines.*") as refused:
        fit_model(PrivateJob(batch=32), workers=64, tensor=2, microbatches=32)
    assert "at least 64 rows" in refused.value.hint
    assert fit_model(PrivateJob(model="gpt-tiny", batch=32), workers=64, tensor=2, microbatches=32).positions == 8
    with pytest.raises(ConfigError, match=r"2 heads over 4 tensor ranks|a Dense of 2"):
        fit_model(PrivateJob(model="gpt-tiny"), workers=4, tensor=4)
    assert fit_model(PrivateJob(model="secureml-a"), workers=8).classes == 10
    with pytest.raises(ConfigError, match="reveals 'predictions'"):
        PrivateJob(task="infer")


def run_client(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any], str]:
    code = client.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def test_check_says_before_any_pod_whether_a_job_can_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"model": "mlp-digits", "steps": 3}))
    code, found, _ = run_client(capsys, "--check", job)
    assert (code, found["rows"]) == (0, {"test": 360, "train": 1437})
    job.write_text(json.dumps({"model": "mlp-digit", "steps": 3}))
    code, _, err = run_client(capsys, "--check", job)
    assert code == 2
    assert "did you mean 'mlp-digits'" in err
    job.write_text(json.dumps({"model": "mlp-digits", "steps": 3, "test_rows": 2}))
    wild = tmp_path / "wild.npz"
    x = np.zeros((9, 64))
    x[0, 0] = 5000.0
    np.savez(wild, x=x, y=np.zeros(9, dtype=np.int64))
    code, _, err = run_client(capsys, "--check", job, "--data", wild)
    assert code == 2
    assert "features reaches 5000" in err
    assert "scale the features" in err


def test_two_owners_share_and_combine_by_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: tuple[Floats, ...]
) -> None:
    (tmp_path / "parties.json").write_text(json.dumps([p.to_json() for p in PUBLIC]))
    (tmp_path / "job.json").write_text(json.dumps(JOB.to_json()))
    np.save(tmp_path / "q.npy", load_digits(7).test_x[:QUERIES])
    np.savez(tmp_path / "w.npz", **{f"weight.{i}": w for i, w in enumerate(weights)})  # type: ignore[arg-type]
    common = ["--job", tmp_path / "job.json", "--parties", tmp_path / "parties.json"]
    keys = [Identity.create(tmp_path / f"{name}-key").public.x25519 for name in ("asks", "owns")]
    common += ["--owners", tmp_path / "asks-key" / "public.json", tmp_path / "owns-key" / "public.json"]
    for name, what in (("asks", ["--data", tmp_path / "q.npy"]), ("owns", ["--weights", tmp_path / "w.npz"])):
        where = ["--owner", tmp_path / f"{name}-key", "--out", tmp_path / name]
        assert run_client(capsys, *common, *where, *what)[0] == 0
    code, found, _ = run_client(capsys, "--combine", tmp_path / "asks", tmp_path / "owns", "--out", tmp_path / "both")
    assert code == 0
    box = (tmp_path / "both" / client.sealed_name(0)).read_bytes()
    inputs = open_set(box, party=0, identity=PARTIES[0], owner=found["owner"], commitments=found["commitments"])
    check_tensors(shapes_of(inputs.tensors), JOB, find_model(JOB.model))
    assert found["owner"] == keys[0]
    open_set(box, party=0, identity=PARTIES[0], owner=keys[0], commitments=found["commitments"], job=JOB)
    code, found, _ = run_client(capsys, "--combine", tmp_path / "owns", tmp_path / "asks", "--out", tmp_path / "turned")
    box = (tmp_path / "turned" / client.sealed_name(0)).read_bytes()
    with pytest.raises(VerificationError, match=r"sealed for owners .* in this order"):
        open_set(box, party=0, identity=PARTIES[0], owner=keys[1], commitments=found["commitments"], job=JOB)
    stranger = ["--owner", tmp_path / "other-key", "--out", tmp_path / "other", "--data", tmp_path / "q.npy"]
    code, _, err = run_client(capsys, *common, *stranger)
    assert code == 2
    assert "--owners names this owner not at all" in err
