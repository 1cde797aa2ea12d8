"""The manual says what the code does: generated pages are fresh, lists are whole, links lead somewhere."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest
import yaml

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from docs.make import __main__ as made  # noqa: E402
from docs.make import alerts, environment, relay, tables  # noqa: E402

PAGES: Final = sorted(DOCS.rglob("*.md"))
BESIDE: Final = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
AGAIN: Final = "run: python -m docs.make"


def _id(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def _prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^(```|~~~).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", made.PAGES)
def test_a_generated_page_is_what_the_code_makes(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == made.PAGES[page](), AGAIN


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#{1,6} (.+?)\s*$", _prose(path), re.MULTILINE)
    return {alerts.anchor(re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", h)) for h in headings}


@pytest.mark.parametrize("path", [*PAGES, *BESIDE], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(path)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = unquote(target).partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in _anchors(there)):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w./-]+\.md\b", text[text.index("\nnav:") :]))
    assert listed == {_id(p) for p in PAGES}


def test_no_page_fetches_anything_from_elsewhere() -> None:
    found = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert found["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & found.keys()
    assert [_id(p) for p in PAGES if "```mermaid" in p.read_text(encoding="utf-8")] == []  # it is fetched when shown


def test_the_pages_are_installed_with_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["data-files"]
    listed = {p for patterns in data.values() for pattern in patterns for p in ROOT.glob(pattern)}
    assert {p for p in DOCS.rglob("*") if p.suffix in (".md", ".json")} <= listed
    for target, patterns in data.items():
        for pattern in patterns:
            if pattern.startswith("docs/") and target != "share/man/man1":
                assert target == f"share/uvcc/{Path(pattern).parent.as_posix()}"


def test_the_recording_moves_by_itself_and_fetches_nothing() -> None:
    text = (DOCS / "demo.svg").read_text(encoding="utf-8")
    assert text.count('<g class="frame"') >= 8
    assert "@keyframes" in text
    assert not re.search(r"<script|@import|@font-face|<image|xlink:href|url\((?!['\"]?#)", text)


def test_the_recording_shows_what_the_console_shows_of_that_run_today() -> None:
    from docs.make import recording

    pictures = recording.replayed(recording.KEPT)
    kept = (DOCS / "demo.svg").read_text(encoding="utf-8")
    shown = [recording.words(frame) for frame in kept.split('<g class="frame"')[1:]]
    assert shown == [recording.words(picture) for picture in pictures], "run: python -m docs.make.recording"
    assert recording.stated(kept) == recording.digests(recording.KEPT, pictures)
    assert "VERIFIED" in shown[-1]  # a picture of a run that came to a good end
    assert "CHANGED" not in "".join(shown)


TERMS: Final = (
    *("Agent", "Approval", "Auditor", "Bundle", "Channel", "Claim", "Coordinator", "Data owner", "Domain", "Drill"),
    *("Epoch", "Full", "Gate", "Halt", "Leaf", "Package", "Party", "Plane", "Pod", "Policy", "Proof", "Proposal"),
    *("Relay", "Replica, stage, rank", "Root", "Roster", "Site policy", "Smoke", "Verdict"),
)


def test_the_glossary_defines_every_term_once_and_pages_lead_to_it() -> None:
    named = re.findall(r"^\*\*([^.*]+)\.\*\*", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert named == sorted(set(named), key=str.lower)
    assert set(TERMS) <= set(named)
    apart = ("glossary.md", "reference/", "security/protocols.md", "security/costs.md")  # lists, and from the code
    leading = {_id(p) for p in PAGES if "glossary.md)" in p.read_text(encoding="utf-8")}
    assert {_id(p) for p in PAGES if not _id(p).startswith(apart)} <= leading


# ---- lists are whole


def test_every_key_of_a_profile_has_a_meaning() -> None:
    from uvcc_console.plan.meanings import MEANINGS, keys
    from uvcc_console.plan.own_profiles import schema

    known = {key for key, _ in keys(schema())}
    assert known - MEANINGS.keys() == set(), "give each a line in uvcc_console/plan/meanings.py"
    assert MEANINGS.keys() - known == set()


def test_every_key_of_a_language_model_s_config_has_a_meaning() -> None:
    from docs.make import lm_config

    known = {key for _, keys in lm_config.sections() for key, _ in keys}
    assert known - lm_config.MEANINGS.keys() == set(), "give each a line in docs/make/lm_config.py"
    assert lm_config.MEANINGS.keys() - known == set()
    assert [section for section, _ in lm_config.sections()] == list(lm_config.ABOUT)


@pytest.mark.parametrize("path", sorted((ROOT / "profiles").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_shipped_profile_names_the_schema_that_it_fits(path: Path) -> None:
    if path.stem.startswith("inventory-hosts"):
        return
    from jsonschema import Draft202012Validator

    text = path.read_text(encoding="utf-8")
    named = re.search(r"^# yaml-language-server: \$schema=(\S+)$", text, re.MULTILINE)
    assert named, "give it the line that the other profiles have"
    schema = json.loads((path.parent / named[1]).read_text(encoding="utf-8"))
    Draft202012Validator(schema).validate(yaml.safe_load(text))


def test_every_environment_variable_is_documented() -> None:
    from uvcc_console.core.settings import KNOWN

    told = environment.YOURS.keys() | environment.SET.keys() | {k.variable for k in KNOWN}
    assert environment.in_code() - told == set(), "tell of it in docs/make/environment.py"
    assert told - environment.in_code() == set()


def test_every_page_that_lists_the_ways_to_a_product_lists_all() -> None:
    """One that went without ``tiles`` kept a contributor from the fastest way of this processor."""
    from uvcc_engine.mpc.kernels.gemm.gemm_paths import PATHS

    told = environment.YOURS["UVCC_GEMM"]
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "docs/decisions.md")}
    for way in PATHS:
        missing = [name for name, text in {"YOURS": told, **pages}.items() if f"`{way}`" not in text]
        assert missing == [], way


def test_every_exit_code_is_documented() -> None:
    assert alerts.codes_in_code() <= alerts.CODES.keys(), "tell of it in docs/make/alerts.py"


def test_every_metric_is_documented() -> None:
    from uvcc_console.core.folding.measures import BEAT_SERIES
    from uvcc_engine.relay.queues import Totals

    assert set(BEAT_SERIES) <= tables.SERIES.keys()
    assert {f"{name}_total" for name in Totals.__slots__} <= tables.RELAY.keys()


def test_every_route_of_the_relay_is_described() -> None:
    found = json.loads((DOCS / "specifications/relay-openapi.json").read_text(encoding="utf-8"))
    assert {path: sorted(m.upper() for m in methods) for path, methods in found["paths"].items()} == relay.routes()


RUNBOOKS: Final = sorted(p.name for p in (DOCS / "runbooks").glob("*.md") if p.name != "index.md")
PROCEDURES: Final = {  # what has to be there beside alerts, exit codes, halts and gates
    "market.md": ("SR-DP at R = 2", "SR-DP at R = 8", "192 workers", "The M7C launch"),
    "spend.md": ("End a run now", "A pod that will not go", "Is anything left"),
    "disasters.md": ("Your machine is lost", "The relay is lost", "A provider is out", "key is compromised"),
}
PARTS: Final = ("You see", "It means", "Do", "It worked when", "It costs")


@pytest.mark.parametrize("page", RUNBOOKS)
def test_every_section_of_a_runbook_has_its_five_parts_in_order(page: str) -> None:
    text = (DOCS / "runbooks" / page).read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        assert re.findall(r"^- \*\*([^*]+)\*\*", body, re.MULTILINE) == list(PARTS), heading


def test_every_alert_exit_code_and_gate_has_its_runbook() -> None:
    assert set(alerts.headings("alerts.md")) == alerts.alerts().keys(), "write its section in docs/runbooks/alerts.md"
    assert set(alerts.headings("exit-codes.md")) == alerts.CODES.keys()
    assert set(alerts.headings("gates.md")) == set(alerts.gates())


def test_every_key_that_a_runbook_has_one_press_or_set_is_there() -> None:
    """A letter alone is a key of the console, ``:word`` a command of it, and ``limits.wait`` a key of the profile."""
    from uvcc_console.plan.meanings import keys
    from uvcc_console.plan.own_profiles import schema
    from uvcc_console.ui.registry.keys import ACTIONS, COMMANDS

    pressed, settings = {a.label for a in ACTIONS.values()}, {key for key, _ in keys(schema())}
    sections = {key.partition(".")[0] for key in settings if "." in key} - {"job"}  # a job has keys of its kind
    for page in RUNBOOKS:
        words = set(re.findall(r"`([^`\n]+)`", (DOCS / "runbooks" / page).read_text(encoding="utf-8")))
        assert {w for w in words if len(w) == 1 and not w.isdigit()} <= pressed, page
        assert {w[1:].split()[0] for w in words if re.fullmatch(r":[a-z]\w*( .*)?", w)} <= COMMANDS.keys(), page
        named = {w.partition(":")[0] for w in words if re.fullmatch(r"[a-z]\w*\.\w+(: \S+)?", w)}
        assert {w for w in named if w.partition(".")[0] in sections} <= settings, page


def test_every_end_of_a_halt_has_its_runbook() -> None:
    page = (DOCS / "runbooks" / "halts.md").read_text(encoding="utf-8")
    missing = {word for word in alerts.halt_words() if not re.search(rf"\b{word}\b", page, re.IGNORECASE)}
    assert missing == set(), "tell in docs/runbooks/halts.md what it asks of the operator"


def test_every_procedure_and_disaster_has_its_runbook() -> None:
    for page, wanted in PROCEDURES.items():
        there = "\n".join(alerts.headings(page))
        assert [words for words in wanted if words not in there] == [], page


def test_the_rungs_of_triage_stand_in_their_order() -> None:
    from uvcc_console.core.answers.triage import LADDER

    text = (DOCS / "runbooks" / "triage.md").read_text(encoding="utf-8")
    assert re.findall(r"^## `(\w+)`$", text, re.MULTILINE) == [rung.word for rung in LADDER]


def test_a_runbook_s_figures_are_the_profile_s() -> None:
    from uvcc_console.plan.profile import load

    text = (DOCS / "runbooks" / "market.md").read_text(encoding="utf-8")
    for name in ("prime-smoke-r2", "prime-full-r8", "prime-phase6-r8s4t2m32", "m7c-1gpu", "m7c-2xa100"):
        section = next(part for part in text.split("\n## ") if f"rollout {name}`" in " ".join(part.split()))
        assert f"{load(name)[1].limits.total:g}" in section.partition("It costs")[2], name


def test_every_decision_says_what_was_measured_and_what_was_not() -> None:
    text = (DOCS / "decisions.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        told = dict(re.findall(r"^- \*\*([\w ]+)\*\*: (.*?)(?=^- |\Z)", body, re.MULTILINE | re.DOTALL))
        assert {"Instead", "Measured"} <= told.keys(), heading
        assert re.search(r"`[^`]*(uvcc|python)[^`]*`", told["Measured"]), f"{heading}: by which command?"
        assert told.keys() <= {"Instead", "Measured", "Not measured"}, heading


def test_a_figure_whose_row_is_not_kept_is_refused() -> None:
    from docs.make import kept_rows

    assert kept_rows.shown({"value": 0.0123, "unit": "s", "metric": "seconds"}) == "12.3 ms"
    with pytest.raises(LookupError, match="no row no_such_row"):
        kept_rows.kept("mpc no_such_row seconds")


def test_a_shorter_name_keeps_the_width_of_its_letters() -> None:
    """A text with the width of a longer one is drawn with gaps between its letters."""
    from docs.make import recording

    text = '<text x="1" textLength="122" clip-path="u">/tmp/x/run</text><text textLength="61">other</text>'
    told = recording.elsewhere(text, "/tmp/x", "~")
    assert told == '<text x="1" textLength="61" clip-path="u">~/run</text><text textLength="61">other</text>'
