"""Which checkpoint a language model goes on from: the newest, or the one the operator names; never one in silence."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lm_kit import small

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, UvccError, VerificationError
from uvcc_engine.train.worker import cli, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert train(small(steps=6, save_every=2, keep=3), folder, "lm") == 0
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def unreadable(folder: Path) -> None:
    """Whole by its manifest, but no tensors: somebody wrote the wrong thing and hashed it."""
    body = json.loads((folder / ck.MANIFEST).read_bytes())["body"]
    shutil.rmtree(folder)
    rank = body["ranks"]["0"]
    ck.save(
        folder.parent,
        run="lm",
        step=int(folder.name.removeprefix("step-")),
        topology=body["topology"],
        contents={"rank0.safetensors": b"\x08" + bytes(7) + b'{"a":1} '},
        cursors=rank["cursors"],
        rng=rank["rng"],
    )


def refused(directory: Path, start: int = -1) -> str:
    try:
        if train(small(steps=8, save_every=2, keep=3), directory, "lm", start=start) == 0:
            return ""
    except UvccError as e:
        return str(e)
    said = json.loads((directory / "exit.json").read_text())
    return f"{said['error']} ({said['hint']})"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda f: flip(f / "rank0.safetensors"), "step-6/rank0.safetensors was altered"),
        (lambda f: flip(f / ck.MANIFEST), "step-6/MANIFEST.json"),
        (lambda f: (f / ck.MANIFEST).unlink(), "step-6 has no manifest"),
        (lambda f: (f / "rank0.safetensors").unlink(), "step-6/rank0.safetensors cannot be read"),
        (unreadable, "step-6/rank0.safetensors cannot be loaded"),
        (lambda f: f.rename(f.with_name("step-7")), "step-7 holds step 6"),
    ],
)
def test_an_altered_checkpoint_is_refused_and_an_older_one_needs_a_decision(
    here: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(here / "checkpoints" / "step-6")
    said = refused(here)
    assert named in said
    assert "uvcc resume RUN --from STEP" in said
    assert len((here / "training.csv").read_text().splitlines()) == 7  # nothing was cut, nothing was trained
    assert refused(here, start=4) == ""
    rows = [int(x.split(",")[0]) for x in (here / "training.csv").read_text().splitlines()[1:]]
    assert rows == list(range(1, 9))
    assert ck.steps_present(here / "aside1_checkpoints")[0] >= 6
    assert len((here / "aside1_checkpoints" / "training.csv").read_text().splitlines()) == 7
    assert ck.survey(here / "checkpoints", run="lm").altered == {}


def test_what_was_never_completed_is_no_checkpoint(here: Path) -> None:
    torn = here / "checkpoints" / "step-8.tmp-0123456789ab"
    torn.mkdir()
    (torn / "rank0.safetensors").write_bytes(b"half")
    assert refused(here) == ""
    events = [json.loads(x) for x in (here / "events.jsonl").read_text().splitlines()]
    assert [e["fields"]["step"] for e in events if e["event"] == "resumed"] == [6]


def test_a_step_that_is_not_there_is_refused_with_those_that_are(here: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint of step 5; there are those of steps 2, 4, 6"):
        train(small(steps=8), here, "lm", start=5)
    assert refused(here, start=0) == ""  # from the beginning; all there was lies aside
    assert ck.steps_present(here / "aside1_checkpoints") == [6, 4, 2]


def test_a_prune_that_is_killed_leaves_no_checkpoint_that_looks_altered(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, ignore_errors: bool = False) -> None:
        (Path(path) / "rank0.safetensors").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(ck.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        ck.prune(here / "checkpoints", 1)
    monkeypatch.undo()
    assert ck.steps_present(here / "checkpoints") == [6, 2]
    assert ck.survey(here / "checkpoints").altered == {}


def test_by_hand_an_earlier_starts_halt_is_taken_back_and_a_new_one_is_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halt = here / ".HALT"
    go_on = ["--resume", str(here), "--set", "runtime.device=cpu"]
    for age_s, steps, status, step in ((10**6, 8, "done", 8), (0, 20, "halted", 9)):
        halt.touch()
        os.utime(halt, (time.time() - age_s,) * 2)
        assert cli([*go_on, "--set", f"train.steps={steps}"]) == 0
        said = json.loads((here / "exit.json").read_text())
        assert (said["status"], said["step"], halt.exists()) == (status, step, status == "halted")
        assert ("is taken back" in capsys.readouterr().out) == (status == "done")


def test_setting_aside_twice_keeps_both(here: Path) -> None:
    root = here / "checkpoints"
    assert ck.set_aside(root, 6) is None
    first = ck.set_aside(root, 4)
    second = ck.set_aside(root, 2)
    assert [p.name for p in (first, second) if p] == ["aside1_checkpoints", "aside2_checkpoints"]
    assert ck.steps_present(root) == [2]
    with pytest.raises(VerificationError):
        ck.verify_step(root, 4)


def test_a_resume_says_whether_what_it_repeats_came_out_the_same(here: Path) -> None:
    """Steps that were done before are done again: the same losses and tensors, or the first step that is another."""

    def again(start: int, **settings: object) -> list[dict[str, int]]:
        known = len((here / "events.jsonl").read_text().splitlines())
        assert train(small(**{"steps": 6, "save_every": 2, "keep": 3, **settings}), here, "lm", start=start) == 0
        lines = [json.loads(x) for x in (here / "events.jsonl").read_text().splitlines()[known:]]
        return [e["fields"] for e in lines if e["event"] == "steps_repeated"]

    exact = {"first": 3, "last": 6, "rows": 4, "checkpoint": 6, "differs": -1}
    assert again(2) == [exact]
    shutil.rmtree(here / "checkpoints" / "step-6")  # as after a kill: rows of steps that no checkpoint holds
    with (here / "training.csv").open("a") as f:
        f.write("7,1.2")
    assert again(-1) == [exact | {"first": 5, "rows": 2, "checkpoint": -1}]
    table = here / "training.csv"
    rows = [x.split(",") for x in table.read_text().splitlines()]
    rows[5][1] = f"{float(rows[5][1]) + 1e-7:.9g}"
    table.write_text("\n".join(",".join(r) for r in rows) + "\n")
    assert again(4) == [exact | {"first": 5, "rows": 2, "differs": 5}]
    assert again(4, lr=0.02) == []  # with other settings nothing is to be the same
