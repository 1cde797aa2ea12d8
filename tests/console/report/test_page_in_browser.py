"""``index.html`` of a package as a browser shows it, on a desk and on a telephone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from package_run import copy_of, home

from uvcc_console.report.figures import write_figures
from uvcc_console.report.package import Package
from uvcc_console.report.page import page
from uvcc_console.report.record import RunRecord

pytest.importorskip("matplotlib")
pytestmark = [
    pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not()),
    pytest.mark.ci("tests/console/report/test_archive.py"),
]
SECTIONS = [
    "What was verified, and what was not",
    "Phase full: what was agreed",
    "By whom",
    "What came out",
    "Epochs, as they ended",
    "Who recorded the same messages",
    "Loss, as all three signed it (3 points)",
    "What the operator's journal tells",
]
DRAWN = "Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth * i.clientWidth, () => 0)))"
# what sticks out of the page; tables scroll within themselves
OUTSIDE = """[...document.body.querySelectorAll('*')].filter(e => !e.closest('table') || e.tagName == 'TABLE')
    .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(e => e.outerHTML.slice(0, 80))"""
# single words at the head of a row that take more than one line
CUT = """[...document.querySelectorAll('td:first-child')].filter(d => /^[a-z]+$/.test(d.textContent)).filter(d => {
    const all = document.createRange(); all.selectNodeContents(d); return all.getClientRects().length > 1
}).map(d => d.textContent)"""


@pytest.fixture(scope="module")
def shown(made_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    run_dir = copy_of(made_package, folder / "home").run_dir
    with home(folder / "home"):
        write_figures(run_dir)
        path = folder / "index.html"
        path.write_text(page(Package(RunRecord.load(run_dir))))
    return path


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Tab]:
    with browser.tab(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.mark.parametrize("width", [1200, 420])
def test_it_is_whole_quiet_and_as_wide_as_the_screen(width: int, tab: browser.Tab, shown: Path, tmp_path: Path) -> None:
    tab.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
    tab.events.clear()
    tab.ask("Page.navigate", url=shown.as_uri())
    tab.wait("Page.loadEventFired")
    drawn = tab.value(DRAWN)
    assert len(drawn) >= 4
    assert all(drawn), f"of {len(drawn)} images {drawn.count(0)} are not drawn"
    assert tab.value("[...document.querySelectorAll('h2')].map(h => h.textContent)") == SECTIONS
    assert tab.value("innerWidth") == width
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value(OUTSIDE) == []
    assert tab.value(CUT) == []
    told = [(e["method"], e["params"]) for e in tab.events]
    asked = {params["request"]["url"] for method, params in told if method == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {shown.as_uri()}
    said = [params for method, params in told if method in ("Log.entryAdded", "Runtime.consoleAPICalled")]
    assert said == []
    assert not [params for method, params in told if method == "Runtime.exceptionThrown"]


def test_what_the_page_may_not_do_is_seen(tab: browser.Tab, shown: Path, tmp_path: Path) -> None:
    """The checks above would find it: a page that loads something, and is too wide."""
    text = shown.read_text().replace(
        "</body>", "<img src='http://127.0.0.1:9/x.png'><pre>" + "x" * 400 + "</pre></body>"
    )
    path = tmp_path / "other.html"
    path.write_text(text)
    tab.events.clear()
    tab.ask("Page.navigate", url=path.as_uri())
    tab.wait("Page.loadEventFired")
    assert 0 in tab.value(DRAWN)
    assert tab.value("document.documentElement.scrollWidth") > tab.value("innerWidth") or tab.value(OUTSIDE)
    assert [e for e in tab.events if e["method"] == "Log.entryAdded"]  # refused by the page's own policy
