"""k-means beyond one owner's training: rows of two owners, answers to secret rows, a model that is served, an audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES, Fleet, Zygote, direct_links

from uvcc_engine import simulate
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.schema import UNLABELLED, Schema, SchemaColumn
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.owner import asking
from uvcc_engine.owner.audit import audit
from uvcc_engine.owner.client import write_shared
from uvcc_engine.sealing.inputs import encode_fixed, share_dataset, share_tensors
from uvcc_engine.sealing.joint import combine, open_set
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sealing.queries import OpenedQuery, ServedJob, open_query, seal_query
from uvcc_engine.sharding.validation import QUERY, fit_model
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.worker.inference import Predictor
from uvcc_engine.worker.served_model import ServedModel

torch.set_num_threads(1)
OTHER = Identity(b"m" * 32, b"v" * 32)
PUBLIC = tuple(p.public for p in PARTIES)
COLUMNS, TRAIN, TEST = 4, 36, 12
MODEL = model_to_json(model_of_list([{"kmeans": 3}], COLUMNS, 0))
TRAINING: dict[str, Any] = {"objective": "inertia", "steps": 3, "batch": TRAIN, "momentum": 0.0, "lr": 1.0}
TRAINING |= {"schedule": "constant", "test_rows": TEST, "min_rows": 2, "reveal": ["loss", "inertia"]}
JOB = PrivateJob.from_json(TRAINING | {"model": MODEL})
HEAPS = 4.0 * np.eye(3, COLUMNS)


def rows(count: int) -> np.ndarray[Any, Any]:
    """Row k lies in heap k mod 3."""
    return HEAPS[np.arange(count) % 3] + np.random.default_rng(2).normal(0.0, 0.3, (count, COLUMNS))


def data() -> Dataset:
    x = rows(TRAIN + TEST)
    return Dataset(x[:TRAIN], np.zeros((TRAIN, 0)), x[TRAIN:], np.zeros((TEST, 0)), 0)


def opened(boxes: Any, party: int) -> Any:
    return open_set(boxes.boxes[party], party=party, identity=PARTIES[party], **boxes.public())


@pytest.mark.parametrize("verify", ["off", "covert"])
def test_rows_of_two_owners_have_the_centroids_of_all_of_them(verify: str) -> None:
    job = replace(JOB, verify=verify, audit_one_in=2) if verify == "covert" else JOB
    whole = data()
    parts = [
        Dataset(whole.train_x[k::2], whole.train_y[k::2], whole.test_x[k::2], whole.test_y[k::2], 0) for k in range(2)
    ]
    owners = zip(parts, (OWNER, OTHER), strict=True)
    made = combine([share_dataset(part, 16, PUBLIC, owner, seed=1, job=job) for part, owner in owners])
    stacked = [np.concatenate([getattr(p, n) for p in parts]) for n in ("train_x", "train_y", "test_x", "test_y")]
    clear = train_plaintext(job, Dataset(stacked[0], stacked[1], stacked[2], stacked[3], 0))

    def body(rt: Runtime) -> tuple[list[float | None], dict[str, float], int]:
        trainer, losses, drawn = trainer_of(rt, job, fit_model(job), opened(made, rt.party)), [], 0
        for step in range(job.steps):
            rt.begin_epoch(step)
            result = trainer.step(step)
            losses.append(result.loss)
            drawn += 0 if result.proved is None else result.proved.claims
        rt.begin_epoch(job.steps)
        return losses, trainer.evaluate(), drawn

    losses, metrics, claims = LocalPlanes(2).run_three(body)[0]
    assert np.allclose(np.array(losses, dtype=float), clear.losses, atol=1e-2)
    assert metrics["inertia"] == pytest.approx(clear.metrics["inertia"], abs=0.05)
    assert (claims > 0) == (verify == "covert")


@pytest.fixture(scope="module")
def centroids() -> np.ndarray[Any, Any]:
    return simulate.train(JOB, data()).weights[0]


def nearest(centroids: np.ndarray[Any, Any], x: np.ndarray[Any, Any]) -> list[int]:
    found: list[int] = ((x[:, None, :] - centroids[None]) ** 2).sum(2).argmin(1).tolist()
    return found


@pytest.mark.parametrize("verify", ["off", "proofs"])
def test_secret_centroids_answer_secret_rows_with_a_cluster(verify: Any, centroids: np.ndarray[Any, Any]) -> None:
    asked = rows(9)
    job = PrivateJob(
        model=JOB.model, objective="inertia", task="infer", steps=3, batch=3, reveal=("predictions",), verify=verify
    )
    purpose = Purpose.of(job, [OWNER.public.x25519, OTHER.public.x25519])
    query = share_tensors({QUERY: encode_fixed("q", asked, 16)}, 16, PUBLIC, OWNER, seed=1, purpose=purpose)
    weight = {"weight.0": encode_fixed("w", centroids, 16)}
    made = combine([query, share_tensors(weight, 16, PUBLIC, OTHER, seed=1, purpose=purpose)])

    def body(rt: Runtime) -> Any:
        predictor = Predictor(rt, job, fit_model(job), opened(made, rt.party))
        for step in range(job.steps):
            rt.begin_epoch(step)
            predictor.step(step)
        return predictor.weight_halves()[0]["prediction"]

    answers = sum(LocalPlanes(3).run_three(body)) / 2.0**16
    assert answers.argmax(1).tolist() == nearest(centroids, asked)
    assert np.allclose(answers.sum(1), 1.0, atol=1e-3)
    assert len(set(answers.argmax(1).tolist())) == 3


def test_a_served_k_means_answers_a_client_beside_nonsense_of_another(centroids: np.ndarray[Any, Any]) -> None:
    clients = (OWNER.public.x25519, OTHER.public.x25519)
    job = PrivateJob(
        model=JOB.model,
        objective="inertia",
        task="serve",
        steps=5,
        batch=8,
        verify="covert",
        reveal=("answers",),
        clients=clients,
    )
    weight = {"weight.0": encode_fixed("w", centroids, 16)}
    made = share_tensors(weight, 16, PUBLIC, OTHER, seed=1, purpose=Purpose.of(job, [OTHER.public.x25519]))
    served, asked = ServedJob("ab" * 32, clients, COLUMNS, 8, 16), rows(6)
    query = seal_query(asked, served, OTHER, PUBLIC)
    wild = np.random.default_rng(3).integers(-(1 << 62), 1 << 62, (3, 2, COLUMNS))

    def body(rt: Runtime) -> Any:
        model = ServedModel(rt, job, fit_model(job), opened(made, rt.party))
        mine = open_query(query.boxes[rt.party], served, party=rt.party, identity=PARTIES[rt.party])
        model.batch = [OpenedQuery("0" * 64, 0, 2, wild[rt.party], wild[(rt.party + 1) % 3]), mine]
        rt.begin_epoch(0)
        model.step(0)
        return model.answers[1][1]

    answers = sum(LocalPlanes(2).run_three(body)) / 2.0**16
    assert answers.argmax(1).tolist() == nearest(centroids, asked)


def test_a_client_finds_its_clusters_in_a_column_of_that_name() -> None:
    schema = Schema("", (), (SchemaColumn("a", "standardise"),), by="id", kind=UNLABELLED)
    model: Any = SimpleNamespace(positions=1, job=SimpleNamespace(objective="inertia"))
    assert asking.answers_csv(np.eye(3)[[1, 2]], model, schema, ["x", "y"]) == "id,cluster\nx,1\ny,2\n"


@pytest.mark.ci("tests/engine/private/test_private_audits.py")
def test_real_workers_are_audited_by_each_other_and_then_by_the_owner(zygote: Zygote, tmp_path: Path) -> None:
    job = replace(JOB, verify="covert", audit_one_in=2, reveal=("loss", "inertia", "seeds"))
    purpose = Purpose.of(job, [OWNER.public.x25519])
    made = share_dataset(data(), job.frac_bits, PUBLIC, OWNER, seed=1, purpose=purpose, job=job)
    fleet = Fleet(tmp_path / "run", zygote, job, direct_links(), made)
    fleet.launch()
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    write_shared(made, tmp_path / "sealed")
    found = audit(fleet.folder, OWNER, tmp_path / "sealed", fleet.home(0) / "policy.json")
    assert found.epochs == job.steps + 1
    assert found.messages > 100
    clear = train_plaintext(job, data())
    assert fleet.result(0)["values"]["inertia"] == pytest.approx(clear.metrics["inertia"], abs=0.05)
