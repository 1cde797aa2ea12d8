"""Three worker processes grow trees, or move centroids: halted and resumed, they have a simulation's very bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from private_kit import OWNER, PARTIES, Fleet, Zygote, direct_links

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.run_files.control import HALT
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.mpc.foundation.prg import PairKeys
from uvcc_engine.owner import program_form
from uvcc_engine.sealing.inputs import share_dataset
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sealing.release import open_weights
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.proof.bundle import assemble_folder
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.terms.policy import Policy

RNG = np.random.default_rng(9)
BITS, ROWS, TEST = 6, 64, 16
MODEL = model_to_json(model_of_list([{"trees": {"count": 3, "depth": 2}}], BITS, 1))
JOB = PrivateJob.from_json(
    {
        "model": MODEL,
        "objective": "binary",
        "steps": 3,
        "batch": 48,
        "momentum": 0.0,
        "lr": 0.5,
        "test_rows": TEST,
        "val_rows": TEST,
        "val_every": 2,
        "checkpoint_every": 2,
        "reveal": ["loss", "accuracy", "auc", "val_loss", "weights"],
    }
)

SORTS = PrivateJob.from_json(
    JOB.to_json()
    | {
        "model": model_to_json(model_of_list([{"trees": {"count": 3, "depth": 2}}], BITS, 3)),
        "objective": "cross-entropy",
        "reveal": ["loss", "accuracy", "val_loss", "weights"],
    }
)

POINTS = RNG.normal(size=(ROWS + 2 * TEST, BITS))
CLUSTERS = PrivateJob.from_json(
    {
        "model": model_to_json(model_of_list([{"kmeans": 3}], BITS, 0)),
        "objective": "inertia",
        "steps": 3,
        "batch": ROWS,
        "momentum": 0.0,
        "schedule": "constant",
        "lr": 1.0,
        "test_rows": TEST,
        "val_rows": TEST,
        "val_every": 2,
        "checkpoint_every": 2,
        "min_rows": 2,
        "reveal": ["loss", "inertia", "val_loss", "weights"],
    }
)


def rows_for(job: PrivateJob) -> Dataset:
    """Bits with two or three classes for trees; numbers without labels for k-means."""
    a, b = ROWS, ROWS + TEST
    if job is CLUSTERS:
        x, y = POINTS, np.zeros((len(POINTS), 0))
        return Dataset(x[:a], y[:a], x[a:b], y[a:b], 0, x[b:], y[b:])
    x = RNG.integers(0, 2, (ROWS + 2 * TEST, BITS)).astype(np.float64)
    if job is SORTS:
        sorts = (x[:, 0] + x[:, 1] * x[:, 2]).astype(np.int64)
        return Dataset(x[:a], sorts[:a], x[a:b], sorts[a:b], 3, x[b:], sorts[b:])
    y = ((x[:, 0] + x[:, 1] * x[:, 2] + RNG.uniform(0, 0.8, len(x))) > 1.0).astype(np.float64)
    return Dataset(x[:a], y[:a], x[a:b], y[a:b], 1, x[b:], y[b:])


def keys_of(policy: Policy, party: int) -> PairKeys:
    """What the party derives from its identity and the policy."""
    one, peers, job = PARTIES[party], policy.peers(party, 0), policy.sid_job
    return PairKeys(
        prev=one.pair_secret(peers[(party + 2) % 3], job, "prg"),
        next=one.pair_secret(peers[(party + 1) % 3], job, "prg"),
        own=one.own_secret(job, "prg"),
    )


@pytest.mark.parametrize(
    ("job", "kind"),
    [(JOB, "trees"), pytest.param(SORTS, "trees", marks=pytest.mark.ci(__file__)), (CLUSTERS, "k-means")],
    ids=["trees", "trees of three classes", "k-means"],
)
def test_workers_have_the_numbers_of_a_simulation_through_a_halt(
    job: PrivateJob, kind: str, zygote: Zygote, tmp_path: Path
) -> None:
    data = rows_for(job)
    made = share_dataset(
        data,
        job.frac_bits,
        tuple(p.public for p in PARTIES),
        OWNER,
        seed=1,
        purpose=Purpose.of(job, [OWNER.public.x25519]),
        job=job,
    )
    fleet = Fleet(tmp_path / "fleet", zygote, job, direct_links(), made)
    fleet.launch(halt=HALT)  # a halt that lies there already stops it after a step
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert (fleet.exit(0)["status"], fleet.exit(0)["step"]) == ("halted", 1)
    fleet.launch(resume=True)
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    boxes = [(fleet.dir(p) / f"result_p{p}r0s0t0.box").read_bytes() for p in range(3)]
    theirs = open_weights(boxes, owner=OWNER, parties=[p.public for p in PARTIES])
    first, second, third = (keys_of(fleet.policy, p) for p in range(3))
    keys = simulate.SessionKeys((first, second, third), sid_of(fleet.policy.sid_job, Coord(0, 0, 0, 0)))
    ours = simulate.train(job, data, keys=keys)
    assert theirs.keys() == {"weight.0"}
    assert np.array_equal(ours.weights[0], theirs["weight.0"])
    values = fleet.result(0)["values"]
    assert values == dict(ours.metrics) | {"loss": ours.losses[-1]}
    assert list(ours.validated) == [2, 3]
    lines = (fleet.dir(0) / "val.csv").read_text().splitlines()[1:]
    assert [float(line.split(",")[1]) for line in lines] == pytest.approx(
        [v["val_loss"] for v in ours.validated.values()]
    )
    out = tmp_path / "collected"
    out.mkdir()
    for p in range(3):
        shutil.copytree(fleet.dir(p) / f"transcript_p{p}r0s0t0", out / f"transcript_p{p}r0s0t0")
    shutil.copy(fleet.home(0) / "policy.json", out / "policy.json")
    shutil.copy(fleet.home(0) / "signatures.json", out / "policy_signatures.json")
    assemble_folder(out)
    verify(out)
    with pytest.raises(ConfigError, match="messages of " + kind + " are follows from the number of training rows"):
        program_form.check(out)
