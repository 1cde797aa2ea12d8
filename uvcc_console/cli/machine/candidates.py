"""What may stand at the cursor of a command line: verbs, options, their values, runs, profiles, pages of the manual.

The scripts for the shells ask for it at every Tab, so that what they offer is what the parsers take.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from uvcc_console.cli import common
from uvcc_console.cli.main import VERBS, module_of
from uvcc_engine.contract.errors import UvccError

FILES: Final = ":files"
"""ListedFile in place of a word: whatever the shell itself offers for a path."""
_RUNS: Final = ("run", "path", "one", "two")
_PATHS: Final = ("path", "one", "two", "file", "profile")
_MOST: Final = 120


class Candidate(NamedTuple):
    """A word that may stand there, and what it does in a few words."""

    word: str
    does: str = ""


def candidates(words: Sequence[str]) -> list[Candidate]:
    """What may stand in place of the last of ``words``, those after ``uvcc``; it may be empty or begun."""
    *before, begun = glued(words) or [""]
    found = _verbs() if not before else _of_verb(before, begun)
    return [c for c in found if c.word == FILES or c.word.startswith(begun)]


def glued(words: Sequence[str]) -> list[str]:
    """The words as they were typed: bash cuts them at ``=`` and gives that sign as a word of its own."""
    out: list[str] = []
    for i, word in enumerate(words):
        if out and (word == "=" or (i and words[i - 1] == "=")):
            out[-1] += word
        else:
            out.append(word)
    return out


def _verbs() -> Iterator[Candidate]:
    yield from (Candidate(verb, about.does) for verb, about in VERBS.items())
    yield from (Candidate(flag) for flag in ("--help", "--version", "--party", "--read-only"))


def _of_verb(before: Sequence[str], begun: str) -> Iterator[Candidate]:
    verb, *rest = before
    if verb not in VERBS:
        return
    parser = common.parser_of(module_of(verb).run)
    given: list[str] = []
    awaited: argparse.Action | None = None
    seen: set[str] = set()
    for word in rest:
        below = _sub(parser)
        if awaited is not None:
            awaited = None
        elif word.startswith("-"):
            option = parser._option_string_actions.get(word.partition("=")[0])
            seen.update(option.option_strings if option is not None else ())
            awaited = option if option is not None and option.nargs != 0 and "=" not in word else None
        elif below is not None and word in below.choices:
            parser, given = below.choices[word], []
        else:
            given.append(word)
    if awaited is not None:
        yield from _values(awaited, begun)
    elif begun.startswith("-"):
        yield from _options(parser, seen)
    else:
        yield from _positional(parser, len(given))


def _sub(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser] | None:
    return next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)


def _options(parser: argparse.ArgumentParser, seen: set[str]) -> Iterator[Candidate]:
    for action in parser._actions:
        again = isinstance(action, argparse._AppendAction)
        if action.help != argparse.SUPPRESS and (again or not seen & set(action.option_strings)):
            yield from (Candidate(o, _told(action.help)) for o in action.option_strings if o.startswith("--"))


def _positional(parser: argparse.ArgumentParser, at: int) -> Iterator[Candidate]:
    below = _sub(parser)
    if below is not None:
        yield from (Candidate(choice.dest, _told(choice.help)) for choice in below._choices_actions)
        return
    places = [a for a in parser._actions if not a.option_strings]
    if places:
        last = places[-1]
        if at < len(places):
            yield from _values(places[at])
        elif last.nargs in ("+", "*"):
            yield from _values(last)


def _values(action: argparse.Action, begun: str = "") -> Iterator[Candidate]:
    """What a value of an option or a place may be, where so much of it is typed; nothing where nobody can tell."""
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if action.choices:
        yield from (Candidate(str(choice)) for choice in action.choices)
    elif metavar == "KEY=VALUE":
        from uvcc_console.plan.meanings import MEANINGS

        if "=" in begun:
            from uvcc_console.plan.key_choices import offered

            yield from map(Candidate, offered(begun))
        else:
            yield from (Candidate(f"{key}=", _told(said)) for key, said in MEANINGS.items())
    elif metavar == "TOPIC":
        from uvcc_console.report import manual

        yield from (Candidate(page.name, page.title) for page in manual.pages())
    elif metavar in ("PROFILE", "NAME"):
        from uvcc_console.plan.profile import available

        yield from (Candidate(p.name, _told(p.about)) for p in available())
    elif action.dest in _RUNS and metavar != "FOLDER" and not action.option_strings:
        yield from (Candidate("last", "the newest run"), Candidate("current", "the run that is going on"))
        try:
            named = [run.name for run in reversed(common.run_dirs())]
        except UvccError:  # nobody reads an error at the Tab key
            named = []
        yield from (Candidate(name) for name in named if name.isprintable() and not name.startswith("-"))
    if action.type is Path or "FILE" in metavar or metavar == "FOLDER" or action.dest in _PATHS:
        yield Candidate(FILES)


def _told(text: str | None) -> str:
    """A help text on one short line."""
    return " ".join((text or "").replace("%%", "%").split())[:_MOST]
