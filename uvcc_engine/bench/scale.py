"""``bench scale``: which costs grow faster than their cause: parameters, batch, proved rows, replicas, stages, tensor
ranks.

Rows of ``power``: 1 is a cost that doubles with its cause, 0 one that does not change. Its range is that between
neighbouring points, its reference the power that is allowed, its bar a little more, for what noise adds. Rows of
``each``: what one more of the cause adds at the largest points. Rows named ``...@N`` are the costs themselves at the
cause N. Rounds, bytes, leaves, transcripts and events do not depend on the machine. Of parameters, batch and proved
rows, ``cpu`` is processor time of one party and ``memory`` that of three in one process; of replicas, stages and tensor
ranks all costs but ``rounds`` are those of all workers together, so that the power of a worker's own is one less; as
many workers share the machine at every point. What more workers cost the console is ``uvcc bench scale``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from uvcc_engine.bench.scenarios.growth_axes import AXES, Axis
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine.benchrows import Row, to_json, to_text
from uvcc_engine.contract.machine.growth import Costs, growth_rows
from uvcc_engine.contract.machine.raising_parser import RaisingParser

UNITS: Final = {
    "bytes": "B",
    "rounds": "rounds",
    "cpu": "s",
    "memory": "B",
    "leaves": "leaves",
    "transcript": "B",
    "events": "B",
    "bundle": "B",
    "verify": "s",
    "messages": "messages",
}


def measured_rows(axis: Axis, points: Sequence[int] = ()) -> list[Row]:
    """The powers and the costs of one axis, at its own points or at others."""
    found: list[tuple[float, Costs]] = axis.measured(points)
    return growth_rows(axis.name, found, axis.allowed, UNITS)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark: ten minutes on two quiet cores."""
    names = [axis.name for axis in AXES]
    parser = RaisingParser(prog="uvcc-engine bench scale", description=__doc__)
    parser.add_argument("--axes", default=",".join(names), help="comma-separated, of " + ", ".join(names))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    asked = args.axes.split(",")
    if unknown := sorted(set(asked) - set(names)):
        raise ConfigError(f"unknown axis {unknown[0]!r}", f"one of: {', '.join(names)}")
    rows = [row for axis in AXES if axis.name in asked for row in measured_rows(axis)]
    print(to_json(rows) if args.json else to_text(rows))
    return 0
