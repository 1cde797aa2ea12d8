"""The pages of both command lines, from the very parsers that read them."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from docs.make.words import HEAD, cell

ENGINE_BENCHES: Final = "uvcc-engine bench"


class _Caught(BaseException):
    """Carries a parser out of the function that was about to use it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


@contextlib.contextmanager
def _catching() -> Iterator[None]:
    def caught(self: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _Caught(self)

    held = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = caught  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args = held  # type: ignore[method-assign]


def parser_of(run: Callable[[list[str]], Any]) -> argparse.ArgumentParser:
    """The parser that a command makes first of all."""
    with _catching(), contextlib.redirect_stdout(io.StringIO()):
        try:
            run([])
        except _Caught as found:
            return found.parser
    raise LookupError(f"{run} makes no parser")


def shown(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    if not action.option_strings:
        return name if action.nargs is None else f"[{name}]" if action.nargs == "?" else f"{name} ..."
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return ", ".join(action.option_strings) + value


def _rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    wanted = [a for a in parser._actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)]
    wanted = [a for a in wanted if not isinstance(a, argparse._SubParsersAction)]
    if not wanted:
        return
    yield "| argument | means |"
    yield "|---|---|"
    for a in wanted:
        said = [(a.help or "").replace("%(default)s", str(a.default)).replace("%%", "%")]
        if a.choices:
            said.append("one of " + ", ".join(f"`{c}`" for c in a.choices))
        if a.default not in (None, "", False, [], argparse.SUPPRESS, 0) and isinstance(a.default, int | float | str):
            said.append(f"default `{a.default}`")
        if a.required and a.option_strings:
            said.append("required")
        yield f"| `{cell(shown(a))}` | {cell('; '.join(s for s in said if s))} |"
    yield ""


def _section(name: str, does: str, parser: argparse.ArgumentParser, level: str = "##") -> Iterator[str]:
    yield f"{level} {name}"
    yield ""
    about = " ".join((parser.description or "").split()).replace("``", "`")
    yield cell(does[:1].upper() + does[1:] + "." if does else about)
    yield ""
    if does and about:
        yield cell(about)
        yield ""
    yield from _rows(parser)
    if parser.epilog:
        yield from ("```text", parser.epilog.rstrip(), "```", "")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for word, below in action.choices.items():
                yield from _section(f"{name} {word}", helps.get(word, ""), below, level + "#")


def console() -> str:
    """Every verb of ``uvcc``."""
    from uvcc_console.cli.main import VERBS, module_of

    lines = [
        "# The command line: uvcc",
        "",
        HEAD,
        "",
        "Data goes to standard output, diagnostics to standard error. `--json` prints one JSON document on standard",
        "output. An error that ends a verb is `error: what (hint)` on standard error; with `--json` also an object on",
        "standard output: `error`, `hint`, `exit_code`. RUN may be shortened to a unique prefix, or be `last` or",
        "`current`. The [exit codes](exit-codes.md) are those of every verb, unless the verb says more. `uvcc` without",
        "a verb opens the console, and `uvcc --party P` that of one domain.",
        "",
    ]
    for verb, about in VERBS.items():
        lines += _section(f"uvcc {verb}", about.does, parser_of(module_of(verb).run))
    return "\n".join(lines).rstrip() + "\n"


def benches() -> dict[str, argparse.ArgumentParser]:
    """The parser of each of the engine's benchmarks, by its name."""
    from uvcc_engine import bench, cli

    names = sorted(p.stem for p in Path(bench.__path__[0]).glob("*.py") if not p.stem.startswith("_"))
    return {name: parser_of(cli._main_of(f"bench {name}", f"uvcc_engine.bench.{name}")) for name in names}


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser behind each command of both programs, by its words: ``uvcc halt``, ``uvcc-engine bench mpc``."""
    from uvcc_console.cli.main import VERBS, module_of
    from uvcc_engine import cli

    found = {f"uvcc {verb}": parser_of(module_of(verb).run) for verb in VERBS}
    for command, (module, _) in cli.COMMANDS.items():
        if command != "bench":
            found[f"uvcc-engine {command}"] = parser_of(cli._main_of(command, module))
    return found | {f"{ENGINE_BENCHES} {name}": parser for name, parser in benches().items()}


def with_those_below(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command's parser and those of the commands below it, by their words."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from with_those_below(f"{name} {word}", below)


def engine() -> str:
    """Every command of ``uvcc-engine``."""
    from uvcc_engine import cli

    lines = [
        "# The command line: uvcc-engine",
        "",
        HEAD,
        "",
        "The side that runs on pods, at data owners and at auditors. The [exit codes](exit-codes.md) follow from what",
        "went wrong.",
        "",
    ]
    for command, (module, does) in cli.COMMANDS.items():
        if command == "bench":
            lines += [
                f"## {ENGINE_BENCHES}",
                "",
                "Measure; what was measured stands in [benchmarks](../benchmarks.md).",
                "",
            ]
            for name, parser in benches().items():
                lines += _section(f"{ENGINE_BENCHES} {name}", "", parser, "###")
            continue
        lines += _section(f"uvcc-engine {command}", does, parser_of(cli._main_of(command, module)))
    return "\n".join(lines).rstrip() + "\n"
