"""Settings that a resume changes: what may be, what it comes to, and how it is taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold, settings_after
from uvcc_console.core.journal.journal import Journal
from uvcc_console.plan.changed_settings import laid_upon, parse, well_formed
from uvcc_console.plan.profile import load
from uvcc_engine.contract.errors import ConfigError


def created(kind: str, **profile: Any) -> ev.RunCreated:
    sizes = {"replicas": 1, "pipeline_stages": 1, "tensor": 1}
    return ev.RunCreated(run="r", profile_name="p", job_kind=kind, stages=["full"], profile=profile, **sizes)


def test_values_are_read_as_yaml_and_an_empty_one_takes_a_change_back() -> None:
    found = parse(["train.lr=0.0001", "train.nonfinite=skip", "runtime.gradient_checkpointing=true", "ddp.bucket_mb="])
    assert found == {
        "train.lr": 0.0001,
        "train.nonfinite": "skip",
        "runtime.gradient_checkpointing": True,
        "ddp.bucket_mb": None,
    }
    assert well_formed(found) == found


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ("train.lr", "write it like"),
        ("train.=1", "names no setting"),
        ("train.lr.x=1", "names no setting"),
        ("model.dim=64", "shape of this model"),
        ("nsa.w=64", "this attention"),
        ("train.steps=9", "planned and priced"),
        ("train.seed=9", "where the checkpoint stood"),
        ("fleet.gpu=1", "no section 'fleet'"),
        ("train.lr=[1, 2]", "not one value"),
    ],
)
def test_what_cannot_be_changed_is_refused_by_name(pair: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse([pair])


@pytest.mark.parametrize(
    "found", [None, [], {"model.dim": 1}, {"train": 1}, {"train.lr": []}, {"train.steps": 5}, {3: 4}]
)
def test_an_intent_that_says_otherwise_is_refused(found: object) -> None:
    with pytest.raises(ConfigError):
        well_formed(found)


def test_changes_add_up_over_attempts_and_are_laid_upon_the_job() -> None:
    made = created("lm")
    s = fold([made, ev.SettingsChanged(changes={"train.lr": 0.5, "train.keep": 2}, by="a")])
    s = fold([ev.SettingsChanged(changes={"train.lr": 0.25, "train.keep": None, "ddp.bucket_mb": 50}, by="b")], s)
    assert dict(s.changed_settings) == {"train.lr": 0.25, "ddp.bucket_mb": 50}
    more = {"train.lr": None, "train.keep": 4}
    assert settings_after(s.changed_settings, more) == {"train.keep": 4, "ddp.bucket_mb": 50}
    assert "train.lr = 0.25, train.keep as planned, ddp.bucket_mb = 50, asked by b" in s.log[-1].text
    job: dict[str, Any] = {"config": "c", "train": {"lr": 1.0, "steps": 7}}
    assert laid_upon(job, s.changed_settings) == {
        "config": "c",
        "train": {"lr": 0.25, "steps": 7},
        "ddp": {"bucket_mb": 50},
    }
    assert job["train"]["lr"] == 1.0, "the plan stays what it was"


def test_a_change_that_would_ruin_the_run_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    profile = load("local-lm-smoke")[1].model_dump(mode="json", exclude_defaults=True)
    begun = created("lm", **profile)
    lowered = ev.SettingsChanged(changes={"train.batch_size": 6}, by="a")
    journal = Journal(folder / "journal.sqlite", source="test")
    journal.append(begun, lowered, ev.StageChanged(name="full", status="failed", detail="x"))
    journal.close()
    for change, said in (
        ("train.grad_clip=0", "train.grad_clip=0.0 (it must be a number above 0)"),
        ("train.lrr=1", "did you mean lr?"),
        ("ddp.tensor=2", "ddp.tensor=2 needs parameters in parts"),
        ("train.batch_size=5", "train.batch_size=5 cannot be shared by 2 ranks"),
    ):
        assert main(["resume", "r", "--from", "0", "--set", change]) == 2
        assert said in capsys.readouterr().err
    assert [e.kind for _, e in Journal(folder / "journal.sqlite", readonly=True).since(0)].count(ev.Intent.kind) == 0


def test_a_private_job_s_settings_are_what_was_agreed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    journal = Journal(folder / "journal.sqlite", source="test")
    journal.append(
        created("private"),
        ev.StageChanged(name="full", status="failed", detail="x"),
    )
    journal.close()
    assert main(["resume", "r", "--set", "train.lr=1"]) == 2
    assert "a private job's settings are what was agreed" in capsys.readouterr().err
