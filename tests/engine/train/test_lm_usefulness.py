"""``uvcc-engine bench usefulness``: which figures it holds against which bars; and, by hand, that they are met."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from uvcc_engine.bench import usefulness
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.train.lm_job import resolve

GOOD = {"nsa": (1.90, 0.97), "dense": (1.89, 0.99), "window": (2.0, 0.13)}


def told(monkeypatch: pytest.MonkeyPatch, figures: dict[str, tuple[float, float]]) -> list[tuple[str, str]]:
    """Have trainings end at once with these losses and shares; returns which were asked for."""
    asked: list[tuple[str, str]] = []

    def learn(config: str, attention: str, folder: Path, sets: Sequence[str]) -> usefulness.Learned:
        asked.append((config, attention))
        loss, found = figures[attention]
        return usefulness.Learned(folder / config, loss, found, 60.0)

    monkeypatch.setattr(usefulness, "learn", learn)
    monkeypatch.setattr(usefulness, "command", lambda *arguments: f"{arguments[0]} {Path(arguments[1]).name}\n")
    return asked


def test_figures_stand_beside_their_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = told(monkeypatch, GOOD)
    assert usefulness.main(["--json"]) == 0
    assert asked == list(usefulness.TRAININGS)
    out = capsys.readouterr()
    rows = {r["name"]: r for r in json.loads(out.out)}
    assert rows["text_val_loss"]["bar"] == pytest.approx(1.02 * 1.89)
    assert rows["text_val_loss"]["ratio"] == pytest.approx(1.90 / 1.89)
    assert [rows[f"letters_{a}"]["met"] for a in ("nsa", "dense", "window")] == [True] * 3
    assert "the text model writes: generate learn_text" in out.err


@pytest.mark.parametrize("worse", [{"nsa": (1.95, 0.97)}, {"nsa": (1.90, 0.94)}, {"window": (2.0, 0.3)}])
def test_a_bar_that_is_missed_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], worse: dict[str, tuple[float, float]]
) -> None:
    told(monkeypatch, GOOD | worse)
    assert usefulness.main([]) == 1
    assert capsys.readouterr().out.count("MISSED") == 1


def test_the_window_does_not_reach_what_is_asked_for() -> None:
    letters, text = (resolve({"config": name}) for name in (usefulness.LETTERS, usefulness.TEXT))
    reach = letters.model.n_layers * (letters.model.nsa.w - 1)
    assert reach < int(usefulness.LENGTH) // 2, "letters stand in the first half of a passage"
    assert text.data.source == "python_docs"


@pytest.mark.ci(__file__)
def test_what_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists"):
        usefulness.main(["--out", str(tmp_path)])
    with pytest.raises(UvccError, match=r"uvcc-engine export failed: error: .*none"):
        usefulness.command("export", str(tmp_path / "none"), "--out", str(tmp_path / "model"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_cores_learn_text_and_letters(tmp_path: Path) -> None:
    said: list[str] = []
    rows = {r.name: r for r in usefulness.measure(tmp_path / "kept", (), said.append)}
    assert {name for name, r in rows.items() if r.met is False} == set(), said
    assert rows["letters_nsa"].value >= 0.95
    assert rows["letters_window"].value <= 0.2
    assert rows["text_val_loss"].ratio is not None
    assert rows["text_val_loss"].ratio <= 1.02
    assert len(said[-1]) > 60
