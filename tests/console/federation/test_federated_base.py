"""Three domains tune a public base on the text of an owner who shares it from its own machine: nobody reads it to
propose it, each domain and the owner have the base's file, and all hold it to the hash that was approved."""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
sys.path.insert(0, str(Path(__file__).parent))
from demorun import PATIENT, user_at
from relaykit import TOKENS, relay_of
from test_federated_run import OWNER_TOKEN, Domains

from uvcc_engine.contract.job.owner_files import schema_beside
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.schema import NEXT, Schema, TextPlan
from uvcc_engine.data.schema_text import schema_text
from uvcc_engine.model.definition.base_model import attached, read_base, write_base
from uvcc_engine.model.definition.layer_list import model_of_list
from uvcc_engine.model.definition.specs import find_model, initial_weights
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.owner.client import dataset_for

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(600)
LETTERS = "abc "
BASE = model_of_list([{"embedding": {"vocabulary": 4, "width": 8}}, {"linear": 8}, "relu", {"linear": 4}], 20, 4, 5)
JOB = {"steps": 2, "batch": 32, "lr": 0.5, "test_rows": 90, "reveal": ["loss", "weights"]}


def write_files(home: Path, *, domain: bool) -> None:
    """The base, and for a domain the profile: in its own folder, as everybody has them."""
    weights = [w + np.random.default_rng(5).normal(0, 0.1, w.shape) for w in initial_weights(BASE, 3, 16)]
    write_base(home / "base.safetensors", BASE, weights, LETTERS)
    if domain:
        asked = {"kind": "private", "base": "base.safetensors", "adapters": {"rank": 2}, **JOB}
        (home / "tune.yaml").write_text(
            "# tune: a public base\n"
            + yaml.safe_dump({"job": asked, "fleet": {"provider": "local"}, "smoke": {"steps": 0}, "link": "direct"})
        )
        return
    rng = np.random.default_rng(1)
    (home / "notes.txt").write_text("".join(rng.choice(list(LETTERS), 600)))
    schema = Schema("next letter", tuple(LETTERS), (), test=0.2, kind=NEXT, text=TextPlan(5, 2))
    schema_beside(home / "base.safetensors").write_text(schema_text(schema, "of the test\n"))


@pytest.mark.ci("tests/console/rollout/test_public_base_plan.py")
def test_a_base_is_tuned_between_three_domains_on_a_text_that_only_its_owner_has(tmp_path: Path) -> None:
    people: list[dict[str, Any]] = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    people.append({"owner": 0, "group": "g", "token": OWNER_TOKEN})
    with ExitStack() as stack:
        url = stack.enter_context(relay_of(tmp_path, people))
        homes = [tmp_path / name for name in ("p0", "p1", "p2", "owner")]
        for home in homes:
            home.mkdir()
            write_files(home, domain=home.name != "owner")
        *users, owner = [stack.enter_context(user_at(home)) for home in homes]
        (owner.home / "token").write_text(OWNER_TOKEN)
        assert owner.run("owner", "init").returncode == 0
        job = tuple(part for key in PATIENT for part in ("--set", key))
        domains = Domains(users, url, job=job, to_owner=("weights",), profile="tune.yaml")
        domains.prepare("--owner", str(owner.home / "config" / "owner" / "owner.pub"))
        assert owner.run("owner", "pin", *map(str, domains.keys)).returncode == 0
        meets = ("--relay", url, "--token-file", str(owner.home / "token"))
        done = owner.run("owner", "requests", *meets)
        assert ": public weights, which each pod holds to this hash" in done.stdout, done.stderr
        another_base_is_refused(domains, 2)
        running = [domains.start(n) for n in range(3)]
        files = ("--data", str(owner.home / "notes.txt"), "--schema", str(owner.home / "base.schema.yaml"))
        done = owner.run("owner", "share", domains.proposal, *files, "--yes", "--wait", "240", *meets)
        assert done.returncode == 0, done.stdout + done.stderr
        for n, process in enumerate(running):
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, (n, err[-3000:])
            assert json.loads(out)["verified"]
        opened = ("owner", "results", domains.proposal[:12], "--out", str(tmp_path / "tuned"), *meets)
        done = owner.run(*opened)
        assert done.returncode != 0
        assert "name its file with --base" in done.stderr
        done = owner.run(*opened, "--base", str(owner.home / "base.safetensors"))
        assert done.returncode == 0, done.stdout + done.stderr
        told = re.search(r"revealed +loss = ([0-9.]+)", done.stdout)
        assert told is not None, done.stdout
        loss = loss_in_clear_where_the_same_training_gives_what_was_opened(tmp_path / "tuned", owner.home, domains)
        assert float(told[1]) == pytest.approx(loss, abs=4e-3)


def another_base_is_refused(domains: Domains, n: int) -> None:
    """Before anything is begun there."""
    own = domains.users[n].home / "base.safetensors"
    kept = own.read_bytes()
    write_base(own, BASE, initial_weights(BASE, 4, 16), LETTERS)
    process = domains.start(n)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 2, err
    assert "the profile's job is not the proposal's: base" in err
    own.write_bytes(kept)


def loss_in_clear_where_the_same_training_gives_what_was_opened(results: Path, owner: Path, domains: Domains) -> float:
    policy = json.loads((domains.run_of(0) / "artifacts" / "full" / "policy.json").read_text())
    job = PrivateJob.from_json(policy["job"])
    model = attached(find_model(job.model), read_base(owner / "base.safetensors", job.base))
    data = dataset_for(job, owner / "notes.txt", schema=owner / "base.schema.yaml")
    clear = train_plaintext(job, data, model=model)
    found = load_file(results / "adapters.safetensors")
    assert len(found) == len(clear.weights) == len(model.weights)
    for number, theirs in enumerate(clear.weights):
        assert np.abs(found[f"weight.{number}"] - theirs).max() < 256 * 2.0**-16
    return clear.losses[-1]
