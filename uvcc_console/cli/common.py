"""What the verbs share: option parsing, finding a run, printing JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uvcc_console.core import paths
from uvcc_console.core.folding import bad_records
from uvcc_console.core.paths import JOURNAL
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.machine.help_text import HelpFormatter
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.machine.reading_width import for_reader
from uvcc_engine.contract.parsing.untrusted import as_timestamp, without_nan
from uvcc_engine.contract.text import clean, clean_block

if TYPE_CHECKING:
    from uvcc_console.core.events import Event
    from uvcc_console.core.snapshot import Snapshot


class VerbParser(RaisingParser):
    """argparse whose errors end a verb as every other error does, and whose help stays within the terminal."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, **named})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; while somebody only asks what a verb takes (``parser_of``), no further than this."""
        show_parser(self)
        return super().parse_known_args(args, namespace)


class Parser(VerbParser):
    """A verb's options, without abbreviated ones, so that scripts stay valid as options are added."""

    def __init__(self, verb: str, about: str) -> None:
        super().__init__(prog=f"uvcc {verb}", description=about, allow_abbrev=False)

    def add_json(self) -> None:
        self.add_argument("--json", action="store_true", help="print JSON on standard output")

    def add_run(self) -> None:
        self.add_argument(
            "run", nargs="?", default="last", metavar="RUN", help="run id, unique prefix, last or current"
        )

    def add_set(self) -> None:
        self.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a profile key")


def _from_anywhere(path: str) -> str:
    """The path of a file as a process that works in another folder finds it."""
    return str(Path(path).expanduser().absolute()) if path else ""


def add_way(parser: argparse.ArgumentParser) -> None:
    """How one gets to a folder elsewhere, as ``ssh`` writes it."""
    parser.add_argument("-p", dest="port", type=int, default=0, metavar="PORT", help="the SSH server's port")
    key = "the private key to log in with"
    parser.add_argument("-i", dest="identity", default="", type=_from_anywhere, metavar="FILE", help=key)
    parser.add_argument("-J", dest="jump", default="", metavar="HOST", help="go through this host first")


_ASKED: ContextVar[bool] = ContextVar("asked", default=False)


class _ParserMadeError(Exception):
    """Carries a verb's parser out of the function that was about to use it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def show_parser(parser: argparse.ArgumentParser) -> None:
    """Hand a verb's parser to ``parser_of``, if it is what asks; :class:`Parser` does so by itself."""
    if _ASKED.get():
        raise _ParserMadeError(parser)


def parser_of(run: Callable[[list[str]], Any]) -> argparse.ArgumentParser:
    """What a verb takes: the parser that its function makes first of all. Nothing of the verb is done."""
    asked = _ASKED.set(True)
    try:
        run([])
    except _ParserMadeError as found:
        return found.parser
    finally:
        _ASKED.reset(asked)
    raise LookupError(f"{run} makes no parser")


def version() -> str:
    """The installed version."""
    from importlib import metadata

    try:
        return metadata.version("uvcc")
    except metadata.PackageNotFoundError:
        return "unknown"


def emit(data: Any) -> None:
    """One JSON document on standard output: ASCII, and ``null`` for what is no number."""
    sys.stdout.write(json.dumps(without_nan(data), indent=2, allow_nan=False) + "\n")


def emit_line(data: Any) -> None:
    """One JSON document on a line of its own, as :func:`emit`."""
    sys.stdout.write(json.dumps(without_nan(data), separators=(",", ":"), allow_nan=False) + "\n")


def event_row(seq: int, event: Event) -> dict[str, Any]:
    """An event of a run as a line of ``uvcc watch``."""
    from uvcc_console.core import events as ev
    from uvcc_console.core.answers.shown import NOT_VERIFIED

    mark = {"mark": NOT_VERIFIED} if isinstance(event, ev.ResultReported) else {}
    return {"seq": seq, "ts": event.ts, "kind": event.kind, **ev.to_json(event), **mark}


def show(text: str) -> None:
    """Text for a reader on standard output, broken between words. Whatever it quotes, no terminal obeys it."""
    hand_out(for_reader(clean_block(text), sys.stdout))


def hand_out(text: str) -> None:
    """Text on standard output that a program or a file may take: cleaned as :func:`show`, its lines as they are."""
    sys.stdout.write(clean_block(text) + "\n")


def wipe() -> None:
    """Clear the terminal and go to its first line, before a picture that replaces the last one."""
    sys.stdout.write("\x1b[H\x1b[J")


def say(text: str) -> None:
    """A diagnostic on standard error, cleaned like :func:`show`."""
    sys.stderr.write(for_reader(clean_block(text), sys.stderr) + "\n")
    sys.stderr.flush()


def tell_error(error: UvccError, code: int, argv: Sequence[str]) -> int:
    """What ends a verb: ``error: what (hint)``, with ``--json`` as an object on standard output, too. Returns ``code``.

    No verb tells an error otherwise: it raises.
    """
    say(f"error: {error}")
    if "--json" in argv:
        emit_line({"error": error.what, "hint": error.hint, "exit_code": code})
    return code


def bar(what: str, done: int, total: int) -> None:
    """How far something is, on one line of a terminal that is written over; elsewhere nothing."""
    if sys.stderr.isatty() and total:
        filled = 30 * done // total
        sys.stderr.write(f"\r{clean(what):<7}[{'#' * filled}{'.' * (30 - filled)}] {100 * done // total:3d} %")
        sys.stderr.write("\n" if done >= total else "")
        sys.stderr.flush()


def typed(question: str) -> str:
    """What somebody answers to a question that is put on standard error."""
    sys.stderr.write(clean(question))
    sys.stderr.flush()
    return sys.stdin.readline().strip()


def agreed(question: str) -> bool:
    """Ask a person; anything but a yes is a no."""
    return typed(f"{question} [y/N] ").lower() in ("y", "yes")


def run_dirs() -> list[Path]:
    """Folders of all runs, in the order in which they were made. Raises UnreadableError where they cannot be listed."""
    from uvcc_console.runs.order import number_of

    found = [p for p in paths.run_folders() if _has_journal(p)]
    return sorted(found, key=lambda p: (number_of(p), _created(p), p.name))


def _has_journal(folder: Path) -> bool:
    try:
        return (folder / JOURNAL).exists()
    except OSError:  # a folder that may not be entered
        return True


def _created(run_dir: Path) -> float:
    """When the run was planned: its first event. The folder's own time stamps move with every file."""
    import sqlite3

    from uvcc_console.core.journal.journal_file import opened

    try:
        db = opened(run_dir / JOURNAL, 2.0, mode="ro")
        try:
            row = db.execute("SELECT ts FROM events ORDER BY seq LIMIT 1").fetchone()
        finally:
            db.close()
    except sqlite3.Error:
        return 0.0
    return (as_timestamp(row[0]) or 0.0) if row else 0.0


def find_run(name: str) -> Path:
    """The folder of a run. Raises UnreadableError for an unknown name, ConfigError for an ambiguous one."""
    if not name:  # of a script's variable that was not set: each name begins with it
        raise ConfigError("the name of the run is empty", "write its id, the beginning of it, or last")
    dirs = run_dirs()
    if not dirs:
        from uvcc_console.runs import keeping

        said, hint = keeping.none_here()
        raise UnreadableError(said, keeping.packed_hint(name) or hint)
    if name == "last":
        return dirs[-1]
    if name == "current":
        from uvcc_console.runs.processes import CONDUCTOR, running

        live = [d for d in dirs if running(d, CONDUCTOR)]
        if not live:
            raise UnreadableError("no run is live", "see: uvcc runs")
        return live[-1]
    exact = [d for d in dirs if d.name == name]
    hits = exact or [d for d in dirs if d.name.startswith(name)]
    if not hits:
        from uvcc_console.runs import keeping
        from uvcc_engine.contract.parsing.suggest import CLOSE, nearest

        if hint := keeping.packed_hint(name):
            raise UnreadableError(f"no run {name!r} here", hint)
        beginnings = {d.name[: len(name)]: d.name for d in dirs}  # a run may be named by its beginning
        close = beginnings.get(nearest(name, beginnings, CLOSE), "")
        raise UnreadableError(
            f"no run {name!r}", f"did you mean {close}? see: uvcc runs" if close else "see: uvcc runs"
        )
    if len(hits) > 1:
        raise ConfigError(f"{name!r} fits {len(hits)} runs: {', '.join(d.name for d in hits[:4])}", "write more of it")
    return hits[0]


def load_snapshot(run_dir: Path) -> Any:
    """The newest snapshot of a run, read from its journal."""
    from uvcc_console.core.journal.journal import Journal, read_newest

    journal = Journal(run_dir / JOURNAL, readonly=True)
    try:
        return read_newest(journal)
    finally:
        journal.close()


def load_summary(run_dir: Path) -> Any:
    """A run's snapshot without curves, log and heartbeats, read in milliseconds however long its journal is."""
    from uvcc_console.core.journal.journal import Journal, read_summary

    journal = Journal(run_dir / JOURNAL, readonly=True)
    try:
        return read_summary(journal)
    finally:
        journal.close()


def read_snapshot(run_dir: Path) -> tuple[Snapshot, str]:
    """A run's summary, or an empty one and why it cannot be read: one damaged folder stops no other's verbs."""
    from uvcc_console.core.snapshot import Snapshot

    try:
        return load_summary(run_dir), ""
    except (UvccError, OSError, *bad_records.ERRORS) as e:
        why = e.what if isinstance(e, UvccError) else f"{type(e).__name__}: {e}"
        return Snapshot(run=run_dir.name, status="unreadable", detail=clean(why)), clean(why)
