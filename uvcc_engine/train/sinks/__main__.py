"""The process of one sink: ``python -m uvcc_engine.train.sinks NAME``, fed with lines of JSON on standard input.

The first line opens the run, the next ones hold figures, the last one says how the training ended. What goes wrong here
ends this process alone, with the reason as its last line on standard error.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TextIO

from uvcc_engine.train.sinks import sink_registry
from uvcc_engine.train.sinks.told_steps import ToldSteps

FAILED = "failed"


def serve(name: str, lines: TextIO) -> None:
    """Hand every line to the sink until the end. Raises whatever the sink raises."""
    first = json.loads(lines.readline())
    folder = Path(first["folder"])
    about = (first["config"], first["training"], first["goes_on"])
    opening = sink_registry.SinkOpening(first["run"], first["project"], folder, *about)
    told = ToldSteps(folder / f"sink_{name}.steps")
    sink = sink_registry.opener(name)(opening)
    if opening.goes_on and told.empty and isinstance(sink, sink_registry.Recalling):
        told.learn(sink.told())
    status = FAILED  # unless the training says otherwise before it goes
    for line in lines:
        row = json.loads(line)
        if "status" in row:
            status = row["status"]
            break
        step, values = row["step"], row["values"]
        if not told.knows(step, values):
            sink.log(step, values)
            told.note(step, values)
    sink.close(status)


def main(argv: list[str]) -> int:
    """Exit code 1 with the reason as the last line on standard error."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # asks the training to halt, which ends this one in turn
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(argv[0], sys.stdin)
    except Exception as error:  # noqa: BLE001 - a library's own, of any kind: the training is told and goes on
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
