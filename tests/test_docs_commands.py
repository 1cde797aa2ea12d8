"""Every command and profile that the manual names is read by the parser that reads it when somebody types it."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from docs.make import commands  # noqa: E402
from uvcc_engine.contract.errors import ConfigError  # noqa: E402

MADE: Final = ("reference/cli.md", "reference/engine-cli.md")  # from the parsers themselves
PAGES: Final = [
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.relative_to(ROOT / "docs").as_posix() not in MADE),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
]
NUMBERS: Final = {"STEP": "1", "SECONDS": "1", "N": "1"}  # what stands for a number
PROGRAMS: Final = ("uvcc", "uvcc-engine")
WITHOUT_A_VERB: Final = ("--help", "--version", "--party", "--read-only")


def named(text: str) -> Iterator[tuple[str, bool]]:
    """Each command, and whether it stands whole: in a block, not in a sentence."""
    for language, body in re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in body.splitlines() if language in ("sh", "console") else ():
            typed = line.removeprefix("$ ") if language == "console" and line.startswith("$ ") else line
            if language == "console" and typed is line:
                continue  # what was printed
            for part in re.split(r"&&|\|\||[|;]|\bdo\b|\buntil\b|&(?=\s)", _unsubstituted(typed)):
                if found := re.search(r"(?:^|\s|/)(uvcc(?:-engine)?(?:\s.*)?)$", part.split(" #")[0].strip()):
                    yield re.split(r"\s\d?>", found[1])[0], True
    prose = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`((?:[A-Z_]+=\S+\s+)*uvcc(?:-engine)?\s[^`]*)`", prose):
        yield re.sub(r"^([A-Z_]+=\S+\s+)*", "", " ".join(code.split())), False


def _unsubstituted(line: str) -> str:
    return re.sub(r"\$\([^()]*\)|\$\w+", "X", line)


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    return commands.parsers()


def refused(command: str, *, whole: bool) -> str:
    """Why the command would not be read; empty where it would."""
    words = [NUMBERS.get(w, w) for w in shlex.split(command)]
    if len(words) < 2 or (words[1] in WITHOUT_A_VERB or words[1] == "VERB"):
        return ""
    depth = 3 if words[:2] == ["uvcc-engine", "bench"] else 2
    parser = parsers().get(" ".join(words[:depth]))
    if parser is None:
        return f"no such command: {' '.join(words[:depth])}"
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(words[depth:])
    except (SystemExit, ConfigError) as end:
        said = end.what if isinstance(end, ConfigError) else heard.getvalue().strip().rpartition("error: ")[2]
        partial = not whole and re.search(r"are required|is required|expected (one|at least one) argument", said)
        return "" if getattr(end, "code", 2) == 0 or partial else said
    except Exception as error:  # noqa: BLE001 a parser of ours refuses by an error of its own
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_command_is_one_that_its_parser_takes(page: Path) -> None:
    found = [(command, refused(command, whole=whole)) for command, whole in named(page.read_text(encoding="utf-8"))]
    assert [(command, why) for command, why in found if why] == []


def test_what_no_parser_takes_is_found() -> None:
    page = "Type `uvcc halt RUN --softly`.\n\n```sh\nuvcc rolout demo   # typed wrong\nuvcc pods --end\n```\n"
    wrong = [command for command, whole in named(page) if refused(command, whole=whole)]
    assert wrong == ["uvcc rolout demo", "uvcc pods --end", "uvcc halt RUN --softly"]
    assert refused("uvcc resume RUN --from STEP", whole=False) == refused("uvcc owner share", whole=False) == ""
    assert refused("uvcc-engine bench mcp", whole=True)
    loop = (
        "```console\n$ for n in a b; do sh as $n uvcc join $(cat id) --yess > $n.log 2>&1 & done\nuvcc nothing\n```\n"
    )
    assert [(c, bool(refused(c, whole=w))) for c, w in named(loop)] == [("uvcc join X --yess", True)]


def test_every_profile_that_the_manual_names_is_there() -> None:
    from uvcc_console.plan.profile import available

    known, wrong = {p.name for p in available()}, []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        own = set(  # which the page has one write
            re.findall(r"(?:file: |title=\"|as `|new |open\(\")([\w-]+)(?:\.yaml| --from)", text)
        )
        places = re.findall(r"uvcc rollout (?:profiles/)?([\w-]+)(?:\.yaml)?|--from ([a-z][\w-]+)", text)
        stated = {name for place in places for name in place if name}
        stated |= set(re.findall(r"`((?:prime|local|m7c|demo|inventory|federated|slurm|kubernetes)-[\w-]+)`", text))
        wrong += [f"{page.name}: {name}" for name in stated - own - known - {"PROFILE", "NAME", "STEP"}]
    assert wrong == []


def test_the_help_of_every_command_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = dict(pair for name, parser in parsers().items() for pair in commands.with_those_below(name, parser))
    assert {"uvcc data infer", "uvcc-engine verify", "uvcc-engine bench ab"} <= found.keys()
    said = {name: parser.format_help() for name, parser in found.items()}
    assert [f"{name}: {line}" for name, text in said.items() for line in text.splitlines() if len(line) > 80] == []
    # each names itself as it is typed
    assert [name for name, text in said.items() if not text.startswith(f"usage: {name} ")] == []
