"""A model that is served by three local pods: two clients ask by command, a halt and a resume lie between questions."""

from __future__ import annotations

import csv
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asked_kit import write_asked
from demorun import PATIENCE_S, Uvcc, user_at

from uvcc_console.cli.parties.infer import made_ticket
from uvcc_console.plan.plan import engine_job, make_plan, revealed_values
from uvcc_console.plan.schema import PrivateJobSettings, Profile
from uvcc_console.rollout.stages.links import fabric, relay
from uvcc_console.rollout.stages.links.relay import client_tokens
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty, sign_policy, write_signatures

KEYS = ["ab" * 32, "cd" * 32]
SERVE: dict[str, Any] = {
    "kind": "private",
    "task": "serve",
    "steps": 9,
    "batch": 4,
    "weights": "w.npz",
    "reveal": ["answers"],
    "clients": KEYS,
}


@pytest.mark.parametrize(
    ("job", "more", "words"),
    [
        ({}, {}, ""),
        ({"idle": "10m"}, {}, ""),
        ({"clients": []}, {}, "lists 0 clients"),
        ({"clients": ["alice"]}, {}, "is no key"),
        ({"reveal": ["predictions"]}, {}, "'serve' reveals 'answers' and nothing else"),
        ({"weights": ""}, {}, "takes the owner's job.weights"),
        ({"data": "rows.csv"}, {}, "no job.data"),
        ({"task": "infer", "reveal": ["predictions"]}, {}, "job.clients in task 'infer'"),
        ({}, {"smoke": {"steps": 2}}, "smoke.steps 0"),
        ({}, {"link": "direct"}, "through the relay: link direct has none"),
        ({}, {"topology": {"replicas": 2}}, ""),  # the plan's own check refuses it: see fit_model
        ({"verify": "products"}, {}, ""),
    ],
)
def test_a_profile_that_serves_says_whom_and_how(job: dict[str, Any], more: dict[str, Any], words: str) -> None:
    made = {"job": SERVE | job, "smoke": {"steps": 0}} | more
    if not words:
        settings = Profile.model_validate(made).job
        assert isinstance(settings, PrivateJobSettings)
        found = PrivateJob.from_json(engine_job(settings, 9))
        assert found.clients == tuple(KEYS)
        assert found.idle == (600.0 if "idle" in job else 0.0)
        return
    with pytest.raises(ValueError, match="validation error") as refused:
        Profile.model_validate(made)
    assert words in str(refused.value)


def test_jobs_that_serve_nobody_say_nothing_of_clients() -> None:
    settings = PrivateJobSettings.model_validate({"kind": "private", "steps": 3})
    assert not {"clients", "idle"} & set(engine_job(settings, 3))
    assert not {"clients", "idle"} & set(PrivateJob().to_json())


def served_run(folder: Path) -> Path:
    """What a rollout leaves of a served model's full phase: policy, signatures, the relay's place, tokens."""
    run_dir = folder / "serve-20261124-1200-abcd"
    full = run_dir / "artifacts" / "full"
    full.mkdir(parents=True)
    (run_dir / "relay").mkdir()
    parties = [Identity(bytes([n + 1]) * 32, bytes([n + 9]) * 32) for n in range(3)]
    settings = PrivateJobSettings.model_validate(SERVE)
    job = engine_job(settings, 9)
    policy = Policy.build(
        job=job,
        model_hash="00" * 32,
        code_hash="11" * 32,
        topology=Topology(),
        parties=[PolicyParty(n, p.public, "local", "here") for n, p in enumerate(parties)],
        owner="22" * 32,
        commitments=["33" * 32] * 3,
        reveal=[(value, "clients") for value in revealed_values(job)],
        limits={},
        nonce="44" * 32,
    )
    (full / "policy.json").write_bytes(policy.canonical)
    write_signatures(
        full / "policy_signatures.json", {n: sign_policy(p, policy, "11" * 32) for n, p in enumerate(parties)}
    )
    return run_dir


def test_a_ticket_is_made_once_the_relay_is_there(tmp_path: Path) -> None:
    run_dir = served_run(tmp_path)
    with pytest.raises(UnreadableError, match="no relay yet"):
        made_ticket(run_dir, 0)
    tokens = client_tokens(run_dir, "full", 2)
    assert tokens == client_tokens(run_dir, "full", 2)
    assert (run_dir / "relay" / "full-clients.json").stat().st_mode & 0o077 == 0
    at = {"url": "http://127.0.0.1:9", "group": "g", "engine_run": f"{run_dir.name}.full", "tokens": "full.json"}
    (run_dir / "relay" / "full.at.json").write_text(json.dumps(at))
    (run_dir / "relay" / "full.json").write_text(json.dumps(["party's"] * 3))
    made = [made_ticket(run_dir, n) for n in range(2)]
    assert [m["token"] for m in made] == tokens
    assert "party's" not in json.dumps(made)
    with pytest.raises(ConfigError, match="there is no client 2"):
        made_ticket(run_dir, 2)
    (run_dir / "artifacts" / "full" / "policy.json").unlink()
    with pytest.raises(UnreadableError, match="no policy yet"):
        made_ticket(run_dir, 0)


async def test_the_rehearsal_goes_the_way_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went over direct links, and said so, where the run then goes through the relay."""
    profile = Profile.model_validate({"job": SERVE, "smoke": {"steps": 0}})
    phase = make_plan("r-1", "r", profile).phases["full"]
    asked = []

    async def relayed(ctx: Any, phase: Any, *, replica: int, stream: bool) -> LinkSpec:
        asked.append(phase.name)
        return LinkSpec(kind="relay", relay_url="http://127.0.0.1:9", group="g")

    monkeypatch.setattr(relay, "relay_link", relayed)
    ctx: Any = SimpleNamespace(plan=SimpleNamespace(profile=profile), federated=None)
    for one in (phase, replace(phase, name=fabric.NAME, kind=fabric.NAME)):
        links = await relay.links_for(ctx, one)
        assert {link.kind for link in links.values()} == {"relay"}
    assert asked == ["full", fabric.NAME]


@pytest.fixture
def uvcc(tmp_path: Path) -> Iterator[Uvcc]:
    with user_at(tmp_path / "home") as user:
        yield user


def answered(process: subprocess.Popen[str], out: Path) -> list[int]:
    said, trouble = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said + trouble
    return [int(row["answer"]) for row in csv.DictReader(out.open())]


def ticket(uvcc: Uvcc, run: str, number: int, out: Path) -> Path:
    """Asked for until the run has come so far."""
    end = time.monotonic() + PATIENCE_S
    while (done := uvcc.run("infer", "ticket", run, "--client", str(number), "--out", str(out))).returncode:
        assert time.monotonic() < end, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_clients_ask_before_and_after_a_halt(tmp_path: Path, uvcc: Uvcc) -> None:
    model, clear = write_asked(tmp_path)
    keys = [uvcc.run("infer", "init", str(tmp_path / name)).stdout.strip() for name in ("alice", "bob")]
    profile = {"job": SERVE | {"model": model, "clients": keys, "steps": 40, "batch": 8, "idle": 30}}
    profile |= {"fleet": {"provider": "local"}, "smoke": {"steps": 0}}
    (tmp_path / "serve.yaml").write_text(json.dumps(profile))
    process = uvcc.start("rollout", str(tmp_path / "serve.yaml"), "--headless", "--json")
    assert process.stderr is not None
    run = process.stderr.readline().split()[1]
    data = ["--data", str(tmp_path / "q.npy")]
    asking = []
    for number, name in enumerate(("alice", "bob")):
        at, out = ticket(uvcc, run, number, tmp_path / f"{name}.ticket"), tmp_path / f"{name}.csv"
        asking.append(
            (uvcc.start("infer", "ask", str(at), *data, "--key", str(tmp_path / name), "--out", str(out)), out)
        )
    for asked, out in asking:
        assert answered(asked, out) == clear
    wrong = uvcc.run("infer", "ask", run, *data, "--client", "1", "--key", str(tmp_path / "alice"))
    assert wrong.returncode == 2
    assert "whose key is another than yours" in wrong.stderr
    assert uvcc.run("halt", run).returncode == 0
    late = tmp_path / "late.csv"
    assert uvcc.run("resume", run).returncode == 0
    asked = uvcc.start("infer", "ask", run, *data, "--key", str(tmp_path / "alice"), "--out", str(late))
    assert answered(asked, late) == clear
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    verified = uvcc.run("verify", run)
    assert "VERIFIED     phase full: 41 epochs" in verified.stdout
