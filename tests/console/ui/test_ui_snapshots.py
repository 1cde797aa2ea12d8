"""How the console looks, kept as SVG: both sizes, colour and NO_COLOR. The README shows one of these very files.

Renew them with ``pytest tests/console/ui/test_ui_snapshots.py --snapshot-update`` and look at every one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from ui_desk import FakeProcesses
from ui_journals import RUN, T0, Story

from uvcc_console.ui.app import UvccApp, open_app
from uvcc_console.ui.home.home_app import HomeApp
from uvcc_console.ui.registry.keys import ACTIONS

WIDE, NARROW = (160, 50), (80, 24)
Compare = Callable[..., bool]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., UvccApp]:
    """An app over a made-up run at a fixed moment; nothing in it depends on this machine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("UVCC_THEME", raising=False)

    def make(story: Story, *, after: float = 1.0, theme: str = "uvcc-dark", **options: Any) -> UvccApp:
        folder = story.write(tmp_path / ".local/share/uvcc/runs" / RUN)
        options.setdefault("processes", FakeProcesses())
        app = open_app(folder, clock=lambda: story.now + after, utc=True, tick_s=3600, budget_s=60, **options)
        app.commands.paste_wait = 0.0
        app.key_time = lambda event: float(app.cadence.count)
        app.animation_level = "none"
        app.theme = theme
        return app

    return make


STORIES: dict[str, Callable[[], Story]] = {
    "provisioning": lambda: Story().provisioning(),
    "smoke": lambda: Story().launched().phase("smoke", 2).train(1, 1),
    "full": lambda: Story().full(40),
    "hold": lambda: Story().full(40).halt("hold", step=40),
    "halted": lambda: Story().halted(),
    "unknown": lambda: Story().halted(unknown=1),
    "fork": lambda: Story().fork(),
    "failed": lambda: Story().failed(),
    "gave_up": lambda: Story().gave_up(),
    "finished": lambda: Story(steps=60).finished(),
}


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["160x50", "80x24"])
@pytest.mark.parametrize("name", STORIES)
def test_overview(snap_compare: Compare, build: Callable[..., App[int]], name: str, size: tuple[int, int]) -> None:
    assert snap_compare(build(STORIES[name]()), terminal_size=size)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["160x50", "80x24"])
def test_changed_since_it_was_verified(
    snap_compare: Compare, build: Callable[..., App[int]], tmp_path: Path, size: tuple[int, int]
) -> None:
    app = build(STORIES["finished"]())
    (tmp_path / ".local/share/uvcc/runs" / RUN / "artifacts/full/proof_bundle.json").write_bytes(b"fulL")
    assert snap_compare(app, terminal_size=size)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["160x50", "80x24"])
@pytest.mark.parametrize("name", ["full", "unknown", "fork"])
def test_no_color(
    snap_compare: Compare,
    build: Callable[..., App[int]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    size: tuple[int, int],
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(build(STORIES[name]()), terminal_size=size)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["160x50", "80x24"])
def test_ascii(snap_compare: Compare, build: Callable[..., App[int]], size: tuple[int, int]) -> None:
    assert snap_compare(build(Story().full(40), ascii_only=True), terminal_size=size)


def test_light(snap_compare: Compare, build: Callable[..., App[int]]) -> None:
    assert snap_compare(build(Story().full(40), theme="uvcc-light"), terminal_size=WIDE)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["160x50", "80x24"])
def test_twenty_four_pods(snap_compare: Compare, build: Callable[..., App[int]], size: tuple[int, int]) -> None:
    story = Story(replicas=8, price=2.4, provider="prime").full(30)
    assert snap_compare(build(story), terminal_size=size)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["160x50", "80x24"])
def test_help(snap_compare: Compare, build: Callable[..., App[int]], size: tuple[int, int]) -> None:
    assert snap_compare(build(Story().full(40)), press=["question_mark"], terminal_size=size)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["160x50", "80x24"])
def test_replay(snap_compare: Compare, build: Callable[..., App[int]], size: tuple[int, int]) -> None:
    app = build(Story().halted(), replay=True)
    app.source.seek(app.source.start + 9.0)  # type: ignore[attr-defined]
    assert snap_compare(app, press=["p"], terminal_size=size)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["160x50", "80x24"])
@pytest.mark.parametrize("page", ["fleet", "charts", "log", "plane", "ledger", "rollout", "cost"])
def test_page(snap_compare: Compare, build: Callable[..., App[int]], page: str, size: tuple[int, int]) -> None:
    assert snap_compare(build(_paged(page)), press=[ACTIONS[f"panel_{page}"].keys], terminal_size=size)


def _paged(page: str) -> Story:
    """A story that gives the page something to say."""
    story = Story(replicas=4, price=2.4, provider="prime").full(30)
    return story.hanging() if page == "plane" else story


@pytest.mark.parametrize(
    "page",
    [
        "fleet",
        pytest.param("charts", marks=pytest.mark.ci(__file__)),
        "log",
        pytest.param("plane", marks=pytest.mark.ci(__file__)),
        "ledger",
        pytest.param("rollout", marks=pytest.mark.ci(__file__)),
        "cost",
    ],
)
def test_page_no_color(
    snap_compare: Compare, build: Callable[..., App[int]], monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(build(_paged(page)), press=[ACTIONS[f"panel_{page}"].keys], terminal_size=NARROW)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["160x50", "80x24"])
def test_home(
    snap_compare: Compare,
    build: Callable[..., App[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / ".local/share/uvcc"))
    Story(steps=30).finished().write(tmp_path / ".local/share/uvcc/runs" / RUN)
    Story().gave_up().write(tmp_path / ".local/share/uvcc/runs/other-20261121-0116-cd34")
    app = HomeApp(now=lambda: T0 + 600, look_s=3600, utc=True)
    app.find_profiles = lambda: None  # type: ignore[method-assign,return-value]
    assert snap_compare(app, terminal_size=size)
