"""Profiles: every refusal names the dotted key and what was probably meant."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from uvcc_console.plan import profile as p
from uvcc_console.plan import worker_secrets
from uvcc_console.plan.other_words import PRIVATE_JOB
from uvcc_console.plan.plan import OWNERS_FILES, engine_job, make_plan
from uvcc_console.plan.schema import PrivateJobSettings as ProfileJob
from uvcc_console.rollout.stages.training.agree import check_job
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob


def refused(*settings: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        p.load("demo", settings)
    return caught.value


@pytest.mark.parametrize(
    ("setting", "key", "nearest"),
    [
        ("job.stepz=3", "job.stepz", "job.steps"),
        ("toplogy.replicas=2", "toplogy", "topology"),
        ("limits.tt=1h", "limits.tt", "limits.ttl"),
        ("smoke.replica=1", "smoke.replica", "smoke.replicas"),
        ("gates.verifyer=ok", "gates.verifyer", "gates.verifier"),
        ("fleet.imge=x", "fleet.imge", "fleet.image"),
        ("steps=3", "steps", "job.steps"),
        ("batch=3", "batch", "job.batch"),
        ("provider=local", "provider", "fleet.provider"),
        ("ttl=1h", "ttl", "limits.ttl"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(setting: str, key: str, nearest: str) -> None:
    error = refused(setting)
    assert error.what == f"unknown key {key} in demo.yaml"
    assert error.hint == f"did you mean {nearest}?"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["secrets=[WANDB_API_KEY=abc]"], "secrets.0"),  # a value has no place in a profile
        (["secrets=[UVCC_STEPS]"], "UVCC_STEPS is set by uvcc itself"),
        (["secrets=[A_KEY]", "env={A_KEY: x}"], "A_KEY is in env, too"),
    ],
)
def test_secrets_are_names_that_nobody_else_sets(settings: list[str], words: str) -> None:
    assert words in str(refused(*settings))


def test_secrets_are_what_this_process_has_and_missing_ones_are_named() -> None:
    here = {"A_KEY": "x", "EMPTY": "", "OTHER": "y"}
    assert worker_secrets.values(["A_KEY"], here) == {"A_KEY": "x"}
    assert worker_secrets.values([], here) == {}
    with pytest.raises(ConfigError, match="EMPTY, GONE of the profile's secrets are not set here"):
        worker_secrets.values(["A_KEY", "EMPTY", "GONE"], here)


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("job.validation=0.1", "job.val_rows"),
        ("job.smoothing=0.1", "job.label_smoothing"),
        ("job.class_weight=[1,2]", "a number for each class"),
        ("job.early_stopping=3", "job.patience"),
        ("job.learning_rate=0.1", "job.lr"),
        ("job.hidden=3", "job.model"),
    ],
)
def test_a_key_of_another_trainer_is_answered_by_what_it_means(setting: str, hint: str) -> None:
    assert hint in refused(setting).hint


def test_keys_of_other_trainers_are_answered_by_keys_that_there_are() -> None:
    known = {f.alias or name for name, f in ProfileJob.model_fields.items()}
    assert not PRIVATE_JOB.keys() & known
    named = {key for hint in PRIVATE_JOB.values() for key in re.findall(r"job\.(\w+)", hint)}
    assert named <= known
    assert named >= {"lr", "batch", "test_rows", "objective", "model"}


def test_a_word_that_is_like_no_key_names_them_all() -> None:
    assert refused("job.zzz=1").hint.startswith("known here: kind, model, steps")


@pytest.mark.parametrize(
    ("setting", "what", "hint"),
    [
        ("job.steps=ten", "job.steps is 'ten'", "wants a whole number"),
        ("job.lr=true", "job.lr is True", "wants a number"),
        ("job.steps=0", "job.steps is 0", "must be greater than 0"),
        ("limits.ttl=5x", "limits.ttl is '5x'", "wants a duration like 90s, 15m or 1h"),
        ("limits.ttl=1:30", "limits.ttl is '1:30'", "wants a duration like 90s, 15m or 1h"),
        ("limits.total=.inf", "limits.total is inf", "wants a finite number"),
        ("gates.loss_falls=perhaps", "gates.loss_falls is 'perhaps'", "wants true or false"),
        ("job.reveal=loss", "job.reveal is 'loss'", "wants a list"),
        ("topology=3", "topology is 3", "wants a mapping of keys"),
        ("job.kind=privat", "job.kind is 'privat'", "did you mean private?"),
        ("link=carrier", "link is 'carrier'", "wants 'auto', 'direct', 'relay', 'stream' or 'nats'"),
    ],
)
def test_a_wrong_value_says_what_is_wanted(setting: str, what: str, hint: str) -> None:
    error = refused(setting)
    assert error.what == f"{what} in demo.yaml"
    assert error.hint == hint


def test_parts_that_contradict_each_other_are_refused() -> None:
    assert "topology.replicas only 1" in refused("smoke.replicas=2").what
    assert "for each of the three parties, not 2" in refused("fleet.per_party=[a, b]").hint
    assert "hosts" in refused("fleet.provider=inventory").hint


def test_settings_keep_their_types_and_go_deep() -> None:
    _, profile = p.load("demo", ["job.steps=17", "limits.ttl=1h30m", "halt.auto=[hold]", "env.NCCL_IB_DISABLE='1'"])
    assert profile.job.steps == 17
    assert profile.limits.ttl == 5400.0
    assert profile.halt.auto == ["hold"]
    assert profile.env == {"NCCL_IB_DISABLE": "1"}


def test_a_setting_that_is_no_setting_is_refused() -> None:
    assert "not key=value" in refused("job.steps").what
    assert "single value" in refused("link.kind=relay").what


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    for name, text in {"list.yaml": "- 1\n", "broken.yaml": "job: {kind: private\n"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            p.load(str(tmp_path / name))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnreadableError, match="cannot read profile"):
        p.load(str(tmp_path / "binary.yaml"))
    with pytest.raises(ConfigError, match="did you mean demo"):
        p.find("demoo")


def test_what_bears_a_profiles_name_and_is_none_is_told_as_what_it_is(tmp_path: Path) -> None:
    large, folder, pipe, link = (tmp_path / f"{name}.yaml" for name in ("large", "folder", "pipe", "link"))
    with large.open("wb") as f:
        f.write(b"job: {kind: private}\n#")
        f.truncate(p.MOST + 1)
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "gone.yaml")
    for path, what in (
        (large, "more than 1 MiB"),
        (folder, "a folder"),
        (pipe, "no file"),
        (link, "a link to nothing"),
    ):
        with pytest.raises(UnreadableError, match=f"{path.name}.* {what}"):
            p.load(str(path))


def test_every_known_profile_is_valid_and_says_what_it_does() -> None:
    found = p.available()
    assert "demo" in {f.name for f in found}
    for one in found:
        name, profile = p.load(str(one.path))
        make_plan(f"{name}-20260101-0000-0000", name, profile)
        assert len(one.about) > 40, f"{one.name} does not say what it does and costs"


def test_link_nats_wants_the_address_of_its_server() -> None:
    assert "needs the server's address in nats.url" in str(refused("link=nats"))
    assert "nats.url, not 'http://x'" in str(refused("link=nats", "nats.url=http://x"))
    _, loaded = p.load("demo", ["link=nats", "nats.url=nats://broker.example:4222"])
    assert loaded.nats.url == "nats://broker.example:4222"


def test_a_profiles_job_is_a_job_of_the_engine() -> None:
    _, profile = p.load("demo")
    plan = make_plan("demo-1", "demo", profile)
    job = PrivateJob.from_json(plan.phases["full"].job)
    assert job.steps == profile.job.steps
    assert PrivateJob.from_json(plan.phases["smoke"].job).steps == profile.smoke.steps


def test_a_profile_knows_every_key_of_the_engines_job_with_its_default() -> None:
    ours = ProfileJob.model_validate({"kind": "private", "steps": 60})
    theirs = PrivateJob(steps=60).to_json()
    assert engine_job(ours, 60, "inventory") == theirs
    assert engine_job(ours, 60, "local") == theirs | {"rounds": "sparing"}  # they share a machine


@pytest.mark.parametrize("rounds", ["few", "sparing"])
def test_whoever_names_the_rounds_gets_them_everywhere(rounds: str) -> None:
    ours = ProfileJob.model_validate({"kind": "private", "steps": 60, "rounds": rounds})
    for provider in ("local", "inventory", "prime"):
        assert PrivateJob.from_json(engine_job(ours, 60, provider)).rounds == rounds


@pytest.mark.parametrize(
    ("change", "fine"),
    [
        ({"optimizer": "adam", "beta2": 0.5}, True),
        ({"beta2": 0.4}, False),
        ({"beta2": 0.9999}, False),
        ({"optimizer": "adagrad"}, False),
        ({"objective": "mse"}, True),
        ({"objective": "hinge"}, False),
        ({"task": "infer", "reveal": ["predictions"]}, True),
        ({"task": "infer", "reveal": ["predictions", "loss"]}, False),
        ({"task": "infer"}, False),
        ({"reveal": ["predictions"]}, False),
        ({"reveal": ["loss", "weights", "seeds"]}, True),
        ({"reveal": ["inputs"]}, False),
        ({"lr": 16.0}, True),
        ({"lr": 16.5}, False),
        ({"momentum": 1.0}, False),
        ({"frac_bits": 25}, False),
        ({"seed": 2**63}, False),
        ({"schedule": "cosine", "warmup": 2}, True),
        ({"schedule": "square"}, False),
        ({"warmup": -1}, False),
        ({"weight_decay": 0.01, "clip_norm": 1.0}, True),
        ({"weight_decay": 1.5}, False),
        ({"clip_norm": 0.005}, False),
        ({"clip_norm": 65}, False),
        ({"objective": "poisson", "reveal": ["loss", "rmse"], "min_rows": 20}, True),
        ({"min_rows": 0}, False),
        ({"loss_every": 0}, False),
    ],
)
def test_a_profile_accepts_exactly_what_the_engine_accepts(change: dict[str, Any], fine: bool) -> None:
    raw = {"kind": "private", "steps": 5} | change
    for accept in (ProfileJob.model_validate, PrivateJob.from_json):
        if fine:
            accept(raw)
        else:
            with pytest.raises((ConfigError, ValidationError)):
                accept(raw)


def test_the_owners_files_of_a_profile_are_found_wherever_the_conductor_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in OWNERS_FILES:
        (tmp_path / name).write_text("")
        key = "job.schema" if name == "data_schema" else f"job.{name}"
        asked = ["job.data=data"] if name == "data_schema" else ["job.task=infer", "job.reveal=[predictions]"]
        _, profile = p.load("demo", [*asked, "smoke.steps=0", f"{key}={name}"])
        assert getattr(profile.job, name) == str(tmp_path / name)


def test_queries_are_answered_once() -> None:
    with pytest.raises(ConfigError, match=r"smoke\.steps 0"):
        p.load("demo", ["job.task=infer", "job.reveal=[predictions]"])
    _, profile = p.load("demo", ["job.task=infer", "job.reveal=[predictions]", "smoke.steps=0"])
    assert list(make_plan("demo-1", "demo", profile).phases) == ["full"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["job.model=mlp-digitz"], "did you mean 'mlp-digits'"),
        (["job.model=gpt-tiny"], "give 14 to 24"),
        (["job.model=secureml-a"], "784"),
        (["job.reveal=[confusion]"], "confusion, of a model by name"),
        (["topology.stages=3"], "for 3 stages"),
        (["job.data=/nowhere/rows.npz"], "/nowhere/rows.npz"),
    ],
)
async def test_a_job_that_does_not_fit_is_refused_while_it_is_planned(
    tmp_path: Path, settings: list[str], said: str
) -> None:
    settings += ["job.frac_bits=8"] if "gpt" in settings[0] else []
    _, profile = p.load("demo", settings)
    plan = make_plan("demo-1", "demo", profile)
    with pytest.raises(UvccError) as refusal:
        await check_job(SimpleNamespace(plan=plan, run_dir=tmp_path, federated=None))  # type: ignore[arg-type]
    told = str(refusal.value)
    assert said in told
    assert "error:" not in told
    assert "see fleet" not in told  # the owner's program says what to do


@pytest.mark.parametrize("key", ["job.verify", "gates.attention"])
def test_the_word_off_is_a_word(key: str) -> None:
    """YAML reads it as false."""
    part, name = key.split(".")
    _, profile = p.load("demo" if part == "job" else "local-lm-smoke", [f"{key}=off"])
    assert getattr(getattr(profile, part), name) == "off"
