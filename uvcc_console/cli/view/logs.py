"""``uvcc logs RUN``: what the run's conductor and halt sidecar logged, by time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from uvcc_console.cli import common
from uvcc_console.core.log import LEVELS
from uvcc_console.runs import logfile
from uvcc_console.runs.processes import HALTD, going, running
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.suggest import CLOSE, nearest

POLL_S = 0.2


def _is(name: str, pod: str) -> bool:
    """Whether a pod is meant: by its name in the run, or by the one that its provider knows."""
    return name == pod or name.endswith(f"-{pod}")


def _check(pod: str, known: Iterable[str]) -> None:
    """Refuse a pod that the run does not have, of which nothing would be printed; without any, every name goes."""
    if pod and (names := list(known)) and not any(_is(name, pod) for name in names):
        near = nearest(pod, names, CLOSE)
        raise ConfigError(
            f"the run has no pod {pod!r}", f"did you mean {near}?" if near else f"it has {', '.join(names)}"
        )


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "logs",
        "What the processes of a run on this machine logged: the conductor and the halt sidecar, merged by time. What "
        "the pods themselves wrote is in the journal (uvcc watch --kind lines) and in the artifacts.",
    )
    parser.add_run()
    parser.add_argument("--json", action="store_true", help="JSON lines: {ts, level, process, message, ...}")
    parser.add_argument("--pod", default="", metavar="POD", help="only what is about this pod")
    parser.add_argument("--level", choices=LEVELS, default=LEVELS[0], help="only this level and worse ones")
    parser.add_argument("--follow", action="store_true", help="go on with what comes, until the run ends")
    args = parser.parse_args(argv)
    run_dir = common.find_run(args.run)
    worse = LEVELS[LEVELS.index(args.level) :]
    known = common.read_snapshot(run_dir)[0]
    made = known.created if known.seq else run_dir.stat().st_mtime  # to read a journal changes the folder's time
    _check(args.pod, known.pods)
    reader = logfile.LogReader(run_dir)
    try:
        while True:
            # asked before reading: a line written between the two is found
            live = args.follow and (going(run_dir, made, time.time()) or running(run_dir, HALTD))
            for entry in reader.new(unfinished=not live):
                if entry.level not in worse or (args.pod and not _is(entry.context.get("pod", ""), args.pod)):
                    continue
                if args.json:
                    common.emit_line(entry.document)
                else:
                    common.show(entry.text())
            sys.stdout.flush()
            if not live:
                return 0
            time.sleep(POLL_S)
    finally:
        reader.close()
