"""``bench ab``: two settings of the trainer in turn: tokens per second of each, and their ratio with an interval.

A setting is a config key (``--b runtime.compile=true``), an environment name of the trainer (``--b NSA_NO_GC=1``), or
``path=`` for one attention path in every branch (``--b path=chunked``). An unknown one is an error, so no setting can
be compared with itself because it was ignored.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from uvcc_engine.bench.work.lm_step import Step
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine.benchrows import Row, row, to_text
from uvcc_engine.contract.machine.help_text import HelpFormatter
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.contract.machine.turns import Ratio, in_turn, ratio
from uvcc_engine.nsa import dispatch
from uvcc_engine.train import env as lm_env
from uvcc_engine.train.allocator import keep_memory
from uvcc_engine.train.config import LMConfig
from uvcc_engine.train.distributed import choose_device, vram_mib
from uvcc_engine.train.lm_job import overrides, resolve


@dataclass(frozen=True, slots=True)
class Setting:
    """One side: its config and the attention path that it forces, or ""."""

    cfg: LMConfig
    path: str


def setting(config: str, given: Sequence[str]) -> Setting:
    """A config with what was given laid upon it. Raises ConfigError for anything that would have no effect."""
    environ = dict(g.split("=", 1) for g in given if g.startswith("NSA_") and "=" in g)
    paths = [g.removeprefix("path=") for g in given if g.startswith("path=")]
    keys = [g for g in given if not g.startswith(("NSA_", "path="))]
    if any(g.startswith("NSA_") and "=" not in g for g in given):
        raise ConfigError("an environment name without a value", "write it like NSA_NO_GC=1")
    if paths and paths[-1] not in dispatch.PATHS:
        raise ConfigError(f"unknown attention path {paths[-1]!r}", f"one of {', '.join(dispatch.PATHS)}")
    raw = {"config": config, "overrides": {"data": {"source": "synthetic"}}}
    cfg, _ = lm_env.apply(resolve({**raw, **overrides(keys)}, vram_mib=vram_mib()), environ)
    return Setting(cfg, paths[-1] if paths else "")


class Side:
    """A setting that takes steps. The path is forced only while it does."""

    def __init__(self, made: Setting, steps: int) -> None:
        self._path, self._steps = made.path or None, steps
        self._step = Step(made.cfg, choose_device(made.cfg.runtime.device, 0), packed=True)

    def rate(self) -> float:
        """Tokens per second over the round's steps."""
        dispatch.force(self._path)
        try:
            return self._step.rate(self._steps)
        finally:
            dispatch.force(None)


def compare(a: Setting, b: Setting, steps: int, runs: int) -> tuple[list[Row], Ratio]:
    """Both sides' rows (b's reference is a), and b's rate over a's."""
    sides = [Side(a, steps), Side(b, steps)]
    for side in sides:
        side.rate()
    ours, theirs = in_turn([s.rate for s in sides], runs)
    found = ratio(theirs, ours)
    first = row("a", "toks_per_s", "tokens/s", ours)
    second = row("b", "toks_per_s", "tokens/s", theirs, statistics.median(ours))
    return [first, replace(second, ratio=found.value)], found


def main(argv: Sequence[str]) -> int:
    parser = RaisingParser(prog="uvcc-engine bench ab", description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("config", nargs="?", default="train_showcase", help="a packaged config or a YAML file")
    parser.add_argument("--a", action="append", default=[], metavar="SETTING", help="of the first side; repeatable")
    parser.add_argument("--b", action="append", default=[], metavar="SETTING", help="of the second side; repeatable")
    parser.add_argument("--steps", type=natural, default=5, help="optimizer steps of one figure")
    parser.add_argument("--runs", type=natural, default=9, help="rounds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    a, b = setting(args.config, args.a), setting(args.config, args.b)
    if a == b:
        raise ConfigError("both sides are the same", "give --a or --b a setting, like --b runtime.compile=true")
    keep_memory()
    rows, found = compare(a, b, max(1, args.steps), max(1, args.runs))
    if args.json:
        last: dict[str, Any] = asdict(rows[1]) | {"ratio_low": found.low, "ratio_high": found.high}
        print(json.dumps([asdict(rows[0]), last]))
        return 0
    print(to_text(rows))
    print(f"b / a = {found.value:.3f}, 95 % interval {found.low:.3f} to {found.high:.3f}")
    return 0
