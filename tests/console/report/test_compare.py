"""Two runs side by side: what is the same, and where they part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from uvcc_console.cli.main import main
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_engine.bench.work.rehearsal import rehearse


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One job; the same again; the same with another nonce; a longer one."""
    found = {}
    for name, steps, nonce in (("a", 3, "11"), ("again", 3, "11"), ("other", 3, "22"), ("longer", 4, "11")):
        found[name] = rehearse(tmp_path_factory.mktemp(name), steps=steps, ops=2, nonce=nonce * 32).folder
    return found


def compared(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, object]]:
    code = main(["compare", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_rerun_is_bit_by_bit_the_same(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compared(capsys, runs["a"], runs["again"])
    assert code == 0
    assert found["same_run"]
    assert found["policy"] == {}
    assert main(["compare", str(runs["a"]), str(runs["again"])]) == 0
    assert "bit by bit the same" in capsys.readouterr().out


def test_another_attempt_parts_in_the_first_epoch(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compared(capsys, runs["a"], runs["other"])
    assert code == 1
    assert (found["same_job"], found["same_data"], found["same_run"]) == (True, True, False)
    assert found["first_difference"] == {"epoch": 0, "workers": ["p0r0s0t0", "p1r0s0t0", "p2r0s0t0"]}
    assert list(found["policy"]) == ["nonce"]  # type: ignore[call-overload]
    main(["compare", str(runs["a"]), str(runs["other"])])
    assert "they part  in epoch 0: p0r0s0t0, p1r0s0t0, p2r0s0t0 signed another root" in capsys.readouterr().out


def test_another_job_is_named_by_its_field(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compared(capsys, runs["a"], runs["longer"])
    assert (code, found["same_job"], found["epochs"]) == (
        1,
        False,
        [len(_epochs(runs["a"])), len(_epochs(runs["longer"]))],
    )
    assert found["policy"]["job.steps"] == [3, 4]  # type: ignore[index]


def test_what_does_not_hold_is_not_compared(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / "proof_bundle.json"
    text = (runs["a"] / "proof_bundle.json").read_text()
    last = json.loads(text)["run_root"]
    changed.write_text(text.replace(last, last[:-1] + ("0" if last[-1] != "0" else "1")))
    assert main(["compare", str(runs["a"]), str(changed)]) == 1
    assert "run root" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["verify", "compare", "timestamp"])
def test_a_run_without_a_bundle_is_told(
    verb: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of a command, or one that failed early: one verb ended in a traceback, another said nothing and 0."""
    artifacts = paths.run_dir("mine-20261121-0115-ab12") / "artifacts"
    artifacts.mkdir(parents=True)
    Journal(artifacts.parent / "journal.sqlite", source="test").close()
    (artifacts / "MANIFEST.json").write_text("{}")
    words = {"compare": [str(runs["a"])], "timestamp": ["--authority", str(tmp_path / "tsa.pem")]}
    assert main([verb, artifacts.parent.name, *words.get(verb, [])]) == 2
    said = capsys.readouterr()
    assert f"{artifacts} holds no proof_bundle.json (was it a private run, and finished?)" in said.err


def _epochs(run: Path) -> list[object]:
    return list(json.loads((run / "proof_bundle.json").read_text())["epochs"])
