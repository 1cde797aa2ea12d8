"""The manual pages of both commands, from the very parsers that read them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from docs.make.alerts import CODES
from docs.make.commands import ENGINE_BENCHES, parsers, shown

_HEAD: Final = '.\\" made by python -m docs.make; do not edit'


def _roff(text: str) -> str:
    """A text as roff takes it: no line begins with a control character, and a minus stays one."""
    flat = " ".join(text.replace("\\", "\\e").replace("`", "").split()).replace("-", "\\-")
    return "\\&" + flat if flat.startswith((".", "'")) else flat


def _command(name: str, does: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """A command with its options, then the commands below it."""
    about = does[:1].upper() + does[1:] + "." if does else parser.description or ""
    yield from (f".SS {_roff(name)}", _roff(about) or "\\&")
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and action not in below and not isinstance(action, argparse._HelpAction):
            told = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
            yield from (".TP", f"\\fB{_roff(shown(action))}\\fR", _roff(told) or "\\&")
    for one in below:
        helps = {choice.dest: choice.help or "" for choice in one._choices_actions}
        for word, theirs in one.choices.items():
            yield from _command(f"{name} {word}", helps.get(word, ""), theirs)


def _end(see: str) -> list[str]:
    lines = [".SH EXIT STATUS"]
    for code, means in CODES.items():
        lines += [".TP", f"\\fB{code}\\fR", _roff(means)]
    return [*lines, ".SH SEE ALSO", see]


def console() -> str:
    """The man page of ``uvcc``."""
    from uvcc_console.cli.main import VERBS, groups

    lines = [_HEAD, ".TH UVCC 1", ".SH NAME"]
    lines += ["uvcc \\- verifiable training on secret shares over three provider domains", ".SH SYNOPSIS"]
    lines += [".B uvcc", "[\\fIVERB\\fR] [\\fIoptions\\fR]", ".SH DESCRIPTION"]
    lines += ["Without a verb, the console. RUN may be shortened to a unique prefix, or be last or current."]
    known = parsers()
    for title, verbs in groups().items():
        lines.append(f".SH {_roff(title).upper()}")
        for verb in verbs:
            lines += _command(f"uvcc {verb}", VERBS[verb].does, known[f"uvcc {verb}"])
    return "\n".join([*lines, *_end("uvcc\\-engine(1); uvcc docs, the manual; uvcc VERB \\-\\-help")]) + "\n"


def engine() -> str:
    """The man page of ``uvcc-engine``."""
    from uvcc_engine.cli import COMMANDS

    lines = [_HEAD, ".TH UVCC-ENGINE 1", ".SH NAME"]
    lines += ["uvcc\\-engine \\- the side of UVCC that runs on pods, at data owners and at auditors", ".SH SYNOPSIS"]
    lines += [".B uvcc\\-engine", "\\fICOMMAND\\fR [\\fIoptions\\fR]", ".SH COMMANDS"]
    for name, parser in parsers().items():
        if name.startswith("uvcc-engine "):
            word = name.removeprefix("uvcc-engine ")
            does = "" if name.startswith(ENGINE_BENCHES) else COMMANDS[word][1]
            lines += _command(name, does, parser)
    return (
        "\n".join([*lines, *_end("uvcc(1); uvcc docs reference/engine\\-cli; uvcc\\-engine COMMAND \\-\\-help")]) + "\n"
    )
