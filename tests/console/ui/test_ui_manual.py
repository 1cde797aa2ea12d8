"""The manual in the terminal: topics, text, links, search, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from textual.widgets import Input, Markdown, OptionList

from uvcc_console.report import manual
from uvcc_console.ui.home.manual_app import ManualApp
from uvcc_console.ui.screens.manual_screen import ManualScreen

Compare = Callable[..., bool]
PAGES = {
    "index": "# Start\n\nRead [alerts](runbooks/alerts.md#loss_nan), or [elsewhere](https://example.org).\n",
    "runbooks/alerts": "# Alerts\n\nWhat they ask of you.\n\n"
    "## `loss_nan`\n\n- **You see** a loss that is no number.\n- **Do** `F9`.\n\n"
    "## `path_dead`\n\n- **You see** a path that is down.\n\n```sh\n## no heading\nuvcc halt last\n```\n",
    "reference/cli": "# The command line\n\n## uvcc halt\n\n| argument | means |\n|---|---|\n| `RUN` | the run |\n",
}


@pytest.fixture
def known(tmp_path: Path) -> list[manual.ManualPage]:
    for name, text in PAGES.items():
        path = tmp_path / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return manual.pages(tmp_path)


@pytest.mark.parametrize("size", [(160, 50), (80, 24)], ids=["160x50", "80x24"])
def test_how_the_manual_looks(snap_compare: Compare, known: list[manual.ManualPage], size: tuple[int, int]) -> None:
    app = ManualApp(known, "loss_nan")
    app.animation_level = "none"
    assert snap_compare(app, terminal_size=size)


def _screen(app: ManualApp) -> ManualScreen:
    assert isinstance(app.screen, ManualScreen)
    return app.screen


async def test_a_link_is_followed_and_b_leads_back(known: list[manual.ManualPage]) -> None:
    app = ManualApp(known)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = _screen(app)
        text = screen.query_one(Markdown)
        text.post_message(Markdown.LinkClicked(text, "runbooks/alerts.md#loss_nan"))
        await pilot.pause()
        assert "loss that is no number" in text.source
        assert "path that is down" not in text.source
        await pilot.press("b")
        await pilot.pause()
        assert text.source.startswith("# Start")


async def test_a_link_that_leads_out_is_only_said(known: list[manual.ManualPage]) -> None:
    app = ManualApp(known)
    async with app.run_test(size=(120, 40)) as pilot:
        text = _screen(app).query_one(Markdown)
        text.post_message(Markdown.LinkClicked(text, "https://example.org"))
        await pilot.pause()
        assert text.source.startswith("# Start")


async def test_a_search_lists_sections_and_enter_opens_one(known: list[manual.ManualPage]) -> None:
    app = ManualApp(known)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("slash", *"path")
        await pilot.pause()
        topics = _screen(app).query_one(OptionList)
        assert [o.id for o in topics.options] == ["runbooks/alerts#path_dead"]
        await pilot.press("enter", "enter")
        await pilot.pause()
        assert "path that is down" in _screen(app).query_one(Markdown).source
        await pilot.press("escape")  # away with the search
        await pilot.pause()
        assert _screen(app).query_one(Input).value == ""
        await pilot.press("escape")
        await pilot.pause()
    assert not app.is_running


def test_topics_are_found_by_page_heading_and_verb(known: list[manual.ManualPage]) -> None:
    found = [
        (page.name, anchor) for page, anchor in (manual.look_up(t, known) for t in ("alerts", "path_dead", "halt"))
    ]
    assert found == [("runbooks/alerts", ""), ("runbooks/alerts", "path_dead"), ("reference/cli", "uvcc-halt")]
    assert manual.look_up("runbooks/alerts.md#loss_nan", known)[1] == "loss_nan"
    with pytest.raises(manual.ConfigError, match="path_ded") as refused:
        manual.look_up("path_ded", known)
    assert "path_dead" in refused.value.hint


def test_a_fence_begins_no_section(known: list[manual.ManualPage]) -> None:
    page = next(p for p in known if p.name == "runbooks/alerts")
    assert [s.anchor for s in manual.sections(page)] == ["", "loss_nan", "path_dead"]


@pytest.mark.parametrize(
    ("here", "link", "there"),
    [
        ("runbooks/index", "alerts.md#x", "runbooks/alerts#x"),
        ("runbooks/index", "../reference/cli.md", "reference/cli"),
        ("runbooks/index", "#alerts", "runbooks/index#alerts"),
        ("index", "https://example.org/x", "https://example.org/x"),
    ],
)
def test_links_are_resolved_against_their_page(here: str, link: str, there: str) -> None:
    assert manual.resolve(here, link) == there
