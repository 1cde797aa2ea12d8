"""``uvcc watch RUN|TARGET``: events as JSON lines, of a run of this console or of a folder that anybody writes to."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

from uvcc_console.cli import common
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.follow.target import is_target
from uvcc_console.runs.processes import conducted
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.suggest import nearest

POLL_S = 0.1


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "watch",
        "A run's events as JSON lines: {seq, ts, kind, ...}. Ends with the run, and where nothing conducts it any "
        "more. A result that a pod streams is marked as reported; the verified one is in the event of kind verdict. "
        "A folder, here (DIR) or elsewhere (user@host:DIR, ssh://user@host:port/DIR), is followed in the same form: "
        "any run directory, or a bare folder with a csv, jsonl or TensorBoard log. Nothing is installed there.",
    )
    parser.add_argument(
        "run",
        nargs="?",
        default="last",
        metavar="RUN|DIR|user@host:DIR",
        help="run id, unique prefix, last or current; or a folder to follow",
    )
    parser.add_json()
    parser.add_argument("--since", type=int, default=0, metavar="SEQ", help="only events after this sequence number")
    parser.add_argument("--kind", action="append", default=[], metavar="KIND", help="only this kind (repeatable)")
    parser.add_argument("--no-follow", action="store_true", help="stop at the newest event")
    common.add_way(parser)
    args = parser.parse_args(argv)
    for kind in args.kind:
        if kind not in (known := ev.kinds()):
            raise ConfigError(f"--kind {kind!r} is no kind of event", f"did you mean {nearest(kind, known)}?")
    if is_target(args.run):
        return asyncio.run(_folder(args))
    if args.port or args.identity or args.jump:
        raise ConfigError(
            f"-p, -i and -J go with user@host:DIR, not with the run {args.run!r}", "see: uvcc watch --help"
        )
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    run_dir = common.find_run(args.run)
    journal = Journal(run_dir / JOURNAL, readonly=True)
    seq, ended = args.since, False
    try:
        while True:
            # asked before reading: an event written between the two is found by the next round
            quiet = not conducted(run_dir)
            batch = list(journal.since(seq))
            for seq, event in batch:
                ended = ended or isinstance(event, ev.RunEnded)
                if not args.kind or event.kind in args.kind:
                    common.emit_line(common.event_row(seq, event))
            sys.stdout.flush()
            if batch:
                continue
            if ended or quiet or args.no_follow:
                return 0
            time.sleep(POLL_S)
    finally:
        journal.close()


class _Stream:
    """Events as lines, numbered as they come."""

    def __init__(self, since: int, kinds: Sequence[str]) -> None:
        self._seq, self._since, self._kinds = 0, since, kinds

    def __call__(self, events: Sequence[ev.Event]) -> None:
        from dataclasses import replace

        for event in events:
            self._seq += 1
            if self._seq > self._since and (not self._kinds or event.kind in self._kinds):
                stamped = event if event.ts else replace(event, ts=time.time())
                common.emit_line(common.event_row(self._seq, stamped))
        sys.stdout.flush()


async def _folder(args: argparse.Namespace) -> int:
    """Follow a folder until its run is over, or for ever. Raises at once where it cannot be reached or is not there."""
    from uvcc_console.follow.adopting import Adoption
    from uvcc_console.follow.follower import FolderFollower
    from uvcc_console.follow.reader import FolderReader
    from uvcc_console.follow.target import read_target

    target = read_target(args.run, args.port)
    shell = Adoption(target, args.identity, args.jump).shell()
    stream = _Stream(args.since, args.kind)
    reader = FolderReader(shell, target.folder)
    try:
        await shell.open()
        await reader.probe()
        follower = FolderFollower(reader, stream, common.say, path="ssh" if target.host else "file")
        if args.no_follow:
            while await follower.once() and reader.behind:
                pass
            return 0 if follower.up else 1
        await follower.run()
        return 1 if reader.failed else 0
    finally:
        await shell.close()
