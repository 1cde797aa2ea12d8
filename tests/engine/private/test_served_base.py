"""Adapters trained beside a public base are served, proved and audited with it: secret they are, the base public."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES, Fleet, Zygote, direct_links, relay_links
from test_public_base import base_of, job_of, rows
from test_served_model import ALICE, Client

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.run_files.control import HALT
from uvcc_engine.data.sets import Dataset, Floats, one_hot
from uvcc_engine.model.definition.base_model import Adapters, adapted, merged
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import mlp
from uvcc_engine.model.learning.plaintext import forward
from uvcc_engine.owner.audit import audit
from uvcc_engine.owner.client import write_shared
from uvcc_engine.sealing.inputs import encode_fixed, share_dataset, share_tensors
from uvcc_engine.sealing.purpose import Purpose

torch.set_num_threads(1)
PUBLIC = tuple(p.public for p in PARTIES)
QUERIES = np.random.default_rng(8).normal(size=(20, 5))


def tuned(folder: Path) -> simulate.SimulatedFit:
    """Adapters and a head that were trained, and their base beside them."""
    folder.mkdir()
    model = adapted(base_of(folder, mlp("m", 5, 6, 3)), Adapters(2, 2.0))
    return simulate.train(job_of(model, lr=1.0, reveal=["loss"]), rows(5, 3), model=model)


def put_base(fleet: Fleet, folder: Path) -> None:
    for party in range(3):
        (fleet.home(party) / owner_files.BASE).write_bytes((folder / owner_files.BASE).read_bytes())


def clearly(fit: simulate.SimulatedFit, x: Floats) -> list[int]:
    """What the ordinary model says that base and adapters make together."""
    plain, whole = merged(fit.model, fit.weights)
    outputs = forward(plain, [torch.from_numpy(w) for w in whole], torch.from_numpy(x))
    best = outputs.topk(2, 1).values
    assert (best[:, 0] - best[:, 1]).min() > 2.0**-8  # no answer hangs on a rounding
    return outputs.argmax(1).tolist()


@pytest.mark.ci("tests/engine/private/test_served_model.py")
@pytest.mark.parametrize("verify", ["off", "proofs", "covert"])
def test_what_was_tuned_is_served_around_its_public_base_through_a_halt(
    verify: str, tmp_path: Path, zygote: Zygote
) -> None:
    fit = tuned(tmp_path / "at")
    given = {"task": "serve", "reveal": ["answers"], "clients": [ALICE.public.x25519], "idle": 10.0, "steps": 6}
    often = {"audit_one_in": 2} if verify == "covert" else {}
    job = job_of(fit.model, **given, **often, verify=verify, checkpoint_every=1)
    named = {f"weight.{i}": encode_fixed(f"weight.{i}", w, 16) for i, w in enumerate(fit.weights)}
    made = share_tensors(named, 16, PUBLIC, OWNER, seed=1, purpose=Purpose.of(job, [OWNER.public.x25519]))
    with relay_links(tmp_path, clients=1) as links:
        fleet = Fleet(tmp_path / "fleet", zygote, job, links, made)
        put_base(fleet, tmp_path / "at")
        fleet.launch(halt=HALT)  # a halt that lies there already stops it after a batch
        client = Client(fleet, 0, ALICE, QUERIES, tmp_path)
        assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
        fleet.launch(resume=True)
        assert client.answers() == clearly(fit, QUERIES)
        assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert len({fleet.result(p)["result_hash"] for p in range(3)}) == 1
    assert sum(b["rows"] for b in fleet.events(0, "batch_answered")) == len(QUERIES)


@pytest.mark.ci(__file__)
def test_a_served_text_model_answers_at_every_place(tmp_path: Path, zygote: Zygote) -> None:
    numbers = np.random.default_rng(2).integers(0, 4, (20, 3))
    letters, after = one_hot(numbers, 4), (numbers + 1) % 4
    model = model_of_list([{"embedding": {"vocabulary": 4, "width": 6}}, "linear"], 12, 4, 3)
    tune = {"model": model_to_json(model), "steps": 6, "batch": 8, "test_rows": 5, "lr": 1.0, "reveal": ["loss"]}
    fit = simulate.train(PrivateJob.from_json(tune), Dataset(letters[5:], after[5:], letters[:5], after[:5], 4))
    given = {"task": "serve", "reveal": ["answers"], "clients": [ALICE.public.x25519], "idle": 10.0, "steps": 4}
    job = PrivateJob.from_json({"model": model_to_json(model), "batch": 8} | given)
    named = {f"weight.{i}": encode_fixed(f"weight.{i}", w, 16) for i, w in enumerate(fit.weights)}
    made = share_tensors(named, 16, PUBLIC, OWNER, seed=1, purpose=Purpose.of(job, [OWNER.public.x25519]))
    with relay_links(tmp_path, clients=1) as links:
        fleet = Fleet(tmp_path / "fleet", zygote, job, links, made)
        client = Client(fleet, 0, ALICE, letters[:5], tmp_path)
        fleet.launch()
        client.join(200)
        assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    told = [line.split(",") for line in client.out.read_text().splitlines()]
    assert told[0] == ["row", "answer 1", "answer 2", "answer 3"]
    clear = fit.outputs(letters[:5]).reshape(5, 3, 4)
    assert [[int(cell) for cell in line[1:]] for line in told[1:]] == clear.argmax(2).tolist()


def test_the_owner_replays_a_training_around_a_base(tmp_path: Path, zygote: Zygote) -> None:
    fit = tuned(tmp_path / "at")
    job = job_of(fit.model, reveal=["loss", "weights", "seeds"])
    made = share_dataset(fit.data, 16, PUBLIC, OWNER, seed=1, purpose=Purpose.of(job, [OWNER.public.x25519]))
    fleet = Fleet(tmp_path / "fleet", zygote, job, direct_links(), made)
    put_base(fleet, tmp_path / "at")
    fleet.launch()
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    write_shared(made, tmp_path / "sealed")
    files = (fleet.folder, OWNER, tmp_path / "sealed", fleet.home(0) / "policy.json")
    with pytest.raises(ConfigError, match="name its file with --base"):
        audit(*files)
    found = audit(*files, tmp_path / "at" / owner_files.BASE)
    assert (found.parties, found.epochs) == ((), job.steps)
