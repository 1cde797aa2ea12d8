"""``bench parallel``: how long groups take to come up, what the pipeline loses, what overlap hides, what sealing costs.

Fleets of real workers train on this machine over direct links. ``bubble_s4_m32`` is read from the ticks that the stages
report: the share of stages x time between a step's first and last tick in which a stage works on nothing; its
reference is the textbook's (S-1)/(M+S-1). So that four stages do run side by side on few cores, messages take 20 ms and
one microbatch is in work at a time: the stages' time is then their rounds, not their turn at a core.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from uvcc_engine.bench.launch.fleet import Fleet, Forker
from uvcc_engine.bench.scenarios.hidden_wait import BAR as HIDDEN_BAR
from uvcc_engine.bench.scenarios.hidden_wait import hidden_rows
from uvcc_engine.bench.scenarios.party_traffic import traffic_rows
from uvcc_engine.bench.scenarios.whole_scale import phase6_rows
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.contract.machine import calibration
from uvcc_engine.contract.machine.benchrows import Row, row, to_json, to_text
from uvcc_engine.contract.machine.calibration import BenchBar
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.parallel.pipeline import UPDATE
from uvcc_engine.sharding.microbatches import IN_FLIGHT_VARIABLE

BenchPart = Sequence[Mapping[str, Any]]  # a stage's ticks: phase, start and end in seconds
DP_BAR_S: Final = 2.0
PP_BAR_S: Final = 1.0
BUBBLE_BAR: Final = 0.15
BARS: Final[calibration.BenchBars] = {
    ("dp_init_p50", "p50"): BenchBar(DP_BAR_S, "python"),
    ("pp_init_p50", "p50"): BenchBar(PP_BAR_S, "python"),
    ("bubble_s4_m32", "share"): BenchBar(BUBBLE_BAR),
    ("hidden_20ms", "share"): BenchBar(HIDDEN_BAR, at_least=True),
}
PARTS: Final = ("init", "bubble", "hidden", "traffic")
PHASE6: Final = "phase6"
_LATENCY_S: Final = 0.02
_LIMIT_S: Final = 300.0


@contextmanager
def trained(job: PrivateJob, size: Topology, env: Mapping[str, str]) -> Iterator[Fleet]:
    """A fleet that has run the job to its end. Raises UvccError, with the workers' logs, if one of them failed."""
    with tempfile.TemporaryDirectory() as folder:
        forker = Forker(Path(folder), env)
        try:
            fleet = Fleet(Path(folder) / "fleet", forker, job, size)
            fleet.launch()
            codes = fleet.wait(_LIMIT_S)
            if set(codes.values()) != {0}:
                raise UvccError("a worker of the benchmark's fleet failed", fleet.logs()[-2000:])
            yield fleet
        finally:
            forker.close()


def init_rows(runs: int, size: Topology) -> list[Row]:
    """Median seconds in which a rank's data-parallel and pipeline groups came up, per run."""
    found: dict[str, list[float]] = defaultdict(list)
    job = PrivateJob(model="mlp4-digits", steps=1, batch=16, test_rows=8)
    for _ in range(runs):
        with trained(job, size, {}) as fleet:
            for group in ("dp", "pp"):
                ready = [e for c in fleet.coords for e in fleet.events(c, "group_ready") if e["group"] == group]
                found[group].append(statistics.median(e["seconds"] for e in ready))
    return [
        row("dp_init_p50", "p50", "s", found["dp"], DP_BAR_S),
        row("pp_init_p50", "p50", "s", found["pp"], PP_BAR_S),
    ]


def bubble_rows(runs: int, stages: int, microbatches: int) -> list[Row]:
    """What real 1F1B loses in a step, per party, and how uneven its stages are.

    The model cuts into stages of nearly equal cost, the loss included (``splits.stage_bounds``), and each party deals
    for as many layers of a stage as the others, for who deals waits less; ``..._uneven`` says how nearly.
    ``..._busiest`` is the idle share of the busiest stage alone, which bounds the step.
    """
    env = {IN_FLIGHT_VARIABLE: "1", "UVCC_PLANE_FAULTS": json.dumps({"latency_s": _LATENCY_S})}
    job = PrivateJob(model="mlp22-digits", steps=1, batch=2 * microbatches, test_rows=8)
    lost, idle, uneven = [], [], []
    for _ in range(runs):
        with trained(job, Topology(1, stages, 1, microbatches), env) as fleet:
            for party in range(PARTIES):
                ticks = [fleet.events(c, "pipeline_tick") for c in fleet.coords if c.party == party]
                lost.append(bubble(ticks))
                idle.append(bubble([max(ticks, key=busy)], ticks))
                uneven.append(max(map(busy, ticks)) / statistics.mean(map(busy, ticks)))
    textbook = (stages - 1) / (microbatches + stages - 1)
    name = f"bubble_s{stages}_m{microbatches}"
    return [
        row(name, "share", "step", lost, textbook),
        row(f"{name}_busiest", "share", "step", idle, textbook),
        row(f"{name}_uneven", "ratio", "mean", uneven, 1.0),
    ]


def busy(ticks: Iterable[Mapping[str, Any]]) -> float:
    """Seconds that a stage worked on microbatches."""
    return float(sum(t["end"] - t["start"] for t in ticks if t["phase"] != UPDATE))


def bubble(stages: Sequence[BenchPart], among: Sequence[BenchPart] = ()) -> float:
    """The share of stages x time in which no microbatch was worked on; the update after the last one is not counted.

    The time is from the first to the last tick of these stages, or of all that they are ``among``.
    """
    work = [t for ticks in among or stages for t in ticks if t["phase"] != UPDATE]
    whole = max(t["end"] for t in work) - min(t["start"] for t in work)
    return 1.0 - sum(map(busy, stages)) / (len(stages) * float(whole))


def main(argv: list[str]) -> int:
    parser = RaisingParser(prog="uvcc-engine bench parallel", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=natural, default=3)
    parser.add_argument("--only", choices=(*PARTS, PHASE6))
    parser.add_argument("--phase6", action="store_true", help="192 workers on this machine, twice: takes minutes")
    args = parser.parse_args(argv)
    parts: dict[str, Callable[[], list[Row]]] = {
        "init": lambda: init_rows(args.runs, Topology(2, 4, 1, 4)),
        "bubble": lambda: bubble_rows(args.runs, 4, 32),
        "hidden": hidden_rows,
        "traffic": lambda: traffic_rows(5 * args.runs),
        PHASE6: lambda: phase6_rows(2),
    }
    wanted = (*PARTS, PHASE6) if args.phase6 else PARTS
    speed = calibration.measure()
    rows = [r for name in ((args.only,) if args.only else wanted) for r in parts[name]()]
    rows = calibration.with_bars(rows, BARS, speed)
    print(to_json(rows) if args.json else to_text(rows))
    return 0
