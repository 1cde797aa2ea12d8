"""``uvcc runs``: the runs of this machine."""

from __future__ import annotations

import argparse
import sys
import time

from uvcc_console.cli import common
from uvcc_console.cli.follow import jsonview
from uvcc_console.cli.main import FAILED
from uvcc_console.core.answers.shown import CHANGED
from uvcc_engine.contract.errors import ConfigError, UvccError


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
    width = max(len(r["run"]) for r in rows)
    common.show(f"{'RUN':<{width}}  {'PROFILE':<16} {'STATUS':<10} {'STAGE':<14} {'STEP':>9}  {'VERIFIED':<8} CREATED")
    for r in rows:
        step = f"{min(max(r['step'] + 1, 0), r['steps'])}/{r['steps']}" if r["steps"] else "-"
        known = r["live"] or r["ended"] or r["status"] == "unreadable"
        status = r["status"] if known else f"{r['status']}?"
        word = {True: "yes", False: "NO", None: "-"}[r["verified"]]
        word = "CHANGED" if r["result"]["mark"] == CHANGED else word
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(r["created"])) if r["created"] else "-"
        common.show(
            f"{r['run']:<{width}}  {r['profile']:<16} {status:<10} {r['stage']:<14} {step:>9}  {word:<8} {when}"
        )
    return 0


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
        said = {"run": args.unpack, "path": str(made)}
        words = f"{args.unpack} is back in {made}"
    if args.json:
        common.emit(said)
    else:
        common.show(words)
    return 0
