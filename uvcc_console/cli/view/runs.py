"""``uvcc runs``: the runs of this machine."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from uvcc_console.cli import common
from uvcc_console.cli.follow import jsonview
from uvcc_console.cli.main import FAILED
from uvcc_console.core.answers.shown import CHANGED
from uvcc_engine.contract.errors import ConfigError, UvccError

_HEAD: Final = ("RUN", "PROFILE", "STATUS", "STAGE", "STEP", "VERIFIED", "CREATED")


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "runs",
        "List the runs of this machine, oldest first. VERIFIED holds only while the files are as they were verified.",
    )
    parser.add_json()
    apart = parser.add_mutually_exclusive_group()
    apart.add_argument("--archived", action="store_true", help="list the runs that were packed away, with their sizes")
    apart.add_argument("--archive", metavar="RUN", help="pack a run that has ended into one file, and its folder away")
    apart.add_argument("--unpack", metavar="RUN", help="bring a run back that was packed away")
    apart.add_argument(
        "--delete",
        metavar="RUN",
        nargs="+",
        help="delete runs that have ended: journal, evidence, results, checkpoints; each once its name was typed",
    )
    parser.add_argument(
        "--yes", action="store_true", help="delete without asking; every RUN is then the whole name of a run"
    )
    args = parser.parse_args(argv)
    if args.yes and not args.delete:
        raise ConfigError("--yes belongs to --delete", "uvcc runs --delete RUN --yes")
    if args.delete:
        return _delete(args)
    if args.archived or args.archive or args.unpack:
        return _kept(args)
    rows = []
    for run_dir in common.run_dirs():
        s, why = common.read_snapshot(run_dir)
        rows.append({**jsonview.summary(s, run_dir), "run": run_dir.name})  # of a copied folder: as commands find it
        if why:
            common.say(f"uvcc: {run_dir.name} is unreadable: {why}")
    if args.json:
        common.emit(rows)
        return 0
    if not rows:
        from uvcc_console.runs import keeping

        common.say("; ".join(keeping.none_here()))
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    common.show("\n".join(table([_cells(r) for r in rows], columns)))
    return 0


def _cells(r: Mapping[str, Any]) -> tuple[str, ...]:
    """A run's cells below ``_HEAD``."""
    step = f"{min(max(r['step'], 0), r['steps'])}/{r['steps']}" if r["steps"] else "-"
    known = r["live"] or r["ended"] or r["status"] == "unreadable"
    word = {True: "yes", False: "NO", None: "-"}[r["verified"]]
    word = "CHANGED" if r["result"]["mark"] == CHANGED else word
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(r["created"])) if r["created"] else "-"
    return r["run"], r["profile"], r["status"] if known else f"{r['status']}?", r["stage"], step, word, when


def table(rows: Sequence[Sequence[str]], columns: int) -> list[str]:
    """The runs below their heads, each on a line of at most ``columns`` where that is possible: when a run was made is
    left out first, for its name says so, and then of which profile."""
    shown = list(range(len(_HEAD)))
    widths = [max(len(row[at]) for row in (_HEAD, *rows)) for at in shown]
    for least in (_HEAD.index("CREATED"), _HEAD.index("PROFILE")):
        if sum(widths[at] + 2 for at in shown) - 2 > columns:
            shown.remove(least)
    return ["  ".join(_cell(row[at], at, widths[at]) for at in shown).rstrip() for row in (_HEAD, *rows)]


def _cell(text: str, at: int, width: int) -> str:
    return text.rjust(width) if _HEAD[at] == "STEP" else text.ljust(width)


def _delete(args: argparse.Namespace) -> int:
    """Delete runs: all that were named, or none where one of them has to stay. Raises UvccError."""
    from uvcc_console.runs import keeping, processes

    found = list(dict.fromkeys(common.find_run(name) for name in args.delete))
    if args.yes and (short := [name for name in args.delete if name not in {d.name for d in found}]):
        raise ConfigError(f"with --yes a run is named whole, and {short[0]!r} is not", "see: uvcc runs")
    if not args.yes and not sys.stdin.isatty():
        raise ConfigError("nobody is here to type a run's name", "add --yes, with the whole names of the runs")
    for run_dir in found:
        s, _ = common.read_snapshot(run_dir)
        if why := keeping.must_stay(run_dir, s, processes.living(run_dir)):
            raise UvccError(f"{run_dir.name} cannot be deleted: {why}", "nothing was deleted")
    done: list[dict[str, str | int]] = []
    for run_dir in found:
        size = keeping.size_of(run_dir)
        if not args.yes and not _typed(run_dir.name, keeping.size_words(size)):
            common.say(f"{run_dir.name} stays")
            continue
        keeping.delete(run_dir)
        done.append({"run": run_dir.name, "bytes": size})
        if not args.json:
            common.show(f"{run_dir.name} is deleted, {keeping.size_words(size)}")
    if args.json:
        common.emit(done)
    return 0 if len(done) == len(found) else FAILED


def _typed(name: str, size: str) -> bool:
    """Whether somebody types a run's name to have it deleted."""
    common.say(f"{name}, {size}: its journal, evidence, results and checkpoints are gone then, for ever.")
    return common.typed("type its name to delete it: ") == name


def _kept(args: argparse.Namespace) -> int:
    """What is done with runs that are packed away: list them, pack one, bring one back. Raises UvccError."""
    from uvcc_console.runs import keeping, processes

    if args.archived:
        found = keeping.archived()
        if args.json:
            common.emit([{"run": run, "bytes": size} for run, size in found.items()])
        for run, size in () if args.json else found.items():
            common.show(f"{keeping.size_words(size):>8}  {run}")
        if not found:
            common.say("no run was packed away")
        return 0
    if args.archive:
        run_dir = common.find_run(args.archive)
        s, _ = common.read_snapshot(run_dir)
        if why := keeping.must_stay(run_dir, s, processes.living(run_dir)):
            raise UvccError(f"{run_dir.name} cannot be packed away: {why}")
        made = keeping.archive(run_dir)
        size = made.stat().st_size
        said: dict[str, str | int] = {"run": run_dir.name, "path": str(made), "bytes": size}
        words = f"{run_dir.name} is packed in {made}, {keeping.size_words(size)}"
    else:
        made = keeping.unpack(args.unpack)
        said = {"run": made.name, "path": str(made)}
        words = f"{made.name} is back in {made}"
    if args.json:
        common.emit(said)
    else:
        common.show(words)
    return 0
