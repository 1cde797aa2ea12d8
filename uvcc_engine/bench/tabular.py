"""``bench tabular``: private training beside the same training in clear, on the data sets that scikit-learn ships.

``covertype`` is made up: 100,000 rows of as many columns as the real one has, which has to be downloaded. Three
parties in one process (``simulate``); the same rows, order, start and schedule in float64 beside them. Held out is
every fifth row by the job's seed. AUC within 0.005, accuracy within one point, RMSE within 1 % of the clear one's.

Standard error tells how far a training is, and how long it will take. SIGTERM and Ctrl-C end it after the step; what
there is is printed.
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final

import numpy as np

from uvcc_engine.bench.work.small_vit import small_vit
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.machine import extras
from uvcc_engine.contract.machine.benchrows import Row, held, row, to_json, to_text
from uvcc_engine.contract.machine.by_itself import exit_code
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.data.bins import bits_of, edges_of
from uvcc_engine.data.sets import Dataset, Floats, split
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.simulate import SimulatedFit, train
from uvcc_engine.simulate.training_bar import Progress

SMALL_VIT: Final = "small vision transformer"
COVERTYPE_ROWS: Final = 100_000
TELL_EVERY_S: Final = 30.0
_MLP: Final = [{"linear": 16}, "relu", "linear"]
_CONV: Final = [{"image": [1, 8, 8]}, {"conv": {"channels": 8, "padding": 1}}, "relu", "avg-pool", "flatten", "linear"]
_TREES: Final = [{"trees": {"count": 20, "depth": 3}}]
BARS: Final = {"auc": 0.005, "accuracy": 0.01, "rmse": 0.01}
"""How far the private number may be on the worse side: as it is, of RMSE relative to the clear one."""


@dataclass(frozen=True, slots=True)
class TabularCase:
    """One line of the table. ``layers``: a list as a job has it, or ``SMALL_VIT`` alone. ``bins``: of trees, which grow
    from all rows, one an epoch; 0: a network."""

    data: str
    layers: list[Any]
    metric: str
    epochs: int
    objective: str = "cross-entropy"
    batch: int = 64
    lr: float = 0.1
    bins: int = 0


CASES: Final = {
    "breast_logistic": TabularCase("breast_cancer", ["linear"], "auc", 6, "binary"),
    "breast_mlp": TabularCase("breast_cancer", _MLP, "auc", 6),
    "breast_trees": TabularCase("breast_cancer", _TREES, "auc", 20, "binary", lr=0.3, bins=16),
    "wine_mlp": TabularCase("wine", _MLP, "accuracy", 10, batch=32),
    "wine_trees": TabularCase("wine", _TREES, "accuracy", 20, lr=0.3, bins=16),
    "diabetes_linear": TabularCase("diabetes", ["linear"], "rmse", 8, "mse", lr=0.05),
    "diabetes_mlp": TabularCase("diabetes", _MLP, "rmse", 8, "mse", lr=0.02),
    "diabetes_trees": TabularCase("diabetes", _TREES, "rmse", 20, "mse", lr=0.2, bins=16),
    "digits_mlp": TabularCase("digits", [{"linear": 32}, "relu", "linear"], "accuracy", 6, batch=128),
    "digits_conv": TabularCase("digits", _CONV, "accuracy", 3, batch=128),
    "digits_vit": TabularCase("digits", [SMALL_VIT], "accuracy", 8, batch=64, lr=0.05),
    "covertype_mlp": TabularCase("covertype", [{"linear": 64}, "relu", "linear"], "accuracy", 1, batch=512, lr=0.2),
}


def dataset(name: str, seed: int, real: bool, single: bool) -> Dataset:
    """One of scikit-learn's, standardised by its training rows. ``single``: labels are numbers for one output."""
    if name == "covertype":
        return covertype(seed)
    extras.require("sklearn", "its data sets are what is trained on")
    from sklearn import datasets

    load: Callable[[], Any] = getattr(datasets, f"load_{name}")
    found = load()
    classes = 1 if real or single else len(found.target_names)
    y = found.target.astype(np.float64 if classes == 1 else np.int64)
    data = split(found.data.astype(np.float64), y, seed, len(y) // 5, classes)
    x, y_of = _scaler(data.train_x), _scaler(data.train_y.astype(np.float64)) if real else None
    made = replace(data, train_x=x(data.train_x), test_x=x(data.test_x))
    if y_of is None:
        return made
    return replace(made, train_y=y_of(data.train_y.astype(np.float64)), test_y=y_of(data.test_y.astype(np.float64)))


def covertype(seed: int, rows: int = COVERTYPE_ROWS) -> Dataset:
    """Made-up rows in the form of the forest cover types: 10 measures, one of 4 areas and one of 40 soils as bits, and
    one of 7 types, which follows from all of them but for one row in ten."""
    of = np.random.default_rng(seed)
    measures = of.normal(size=(rows, 10))
    area, soil = of.integers(0, 4, rows), of.integers(0, 40, rows)
    x = np.concatenate([measures, np.eye(4)[area], np.eye(40)[soil]], 1)
    hidden = np.maximum(measures @ of.normal(size=(10, 24)) + of.normal(size=(4, 24))[area], 0.0)
    scores = hidden @ of.normal(size=(24, 7)) + of.normal(size=(40, 7))[soil]
    y = np.where(of.random(rows) < 0.1, of.integers(0, 7, rows), scores.argmax(1)).astype(np.int64)
    return split(x, y, seed, rows // 5, 7)


def _scaler(rows: Floats) -> Callable[[Floats], Floats]:
    mean, spread = rows.mean(0), rows.std(0)
    spread = np.where(spread > 0, spread, 1.0)

    def scaled(x: Floats) -> Floats:
        found: Floats = (x - mean) / spread
        return np.clip(found, -30.0, 30.0)

    return scaled


class StoppedError(Exception):
    """SIGTERM or SIGINT came."""


class TableProgress:
    """Tells how far a training is, and ends what goes on once a signal came."""

    def __init__(self) -> None:
        self._asked, self._training, self._name, self._began, self._told = False, False, "", 0.0, 0.0
        self.done = 0
        """Steps of the training that goes on, or of the last one."""
        self.step_s = 0.0
        """What each of them took, on average."""

    def begin(self, name: str) -> None:
        """A training begins."""
        self._training, self._name, self.done, self.step_s = True, name, 0, 0.0
        self._began = self._told = time.monotonic()

    def step(self, done: int, steps: int, loss: float | None) -> None:
        """So many steps are done. Raises StoppedError where that is the last one."""
        now = time.monotonic()
        self.done, self.step_s = done, (now - self._began) / done
        if done in (1, steps) or now - self._told >= TELL_EVERY_S or self._asked:
            self._told = now
            left = f"{self.step_s * (steps - done):.0f} s to go"
            print(
                f"{self._name}: {done} of {steps} steps, {self.step_s:.3g} s each, {left}", file=sys.stderr, flush=True
            )
        if self._asked:
            raise StoppedError
        self._training = done < steps

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """As a handler of signals: end the training after this step, or whatever else goes on now."""
        self._asked = True
        if not self._training:
            raise StoppedError

    @contextmanager
    def of_signals(self) -> Iterator[None]:
        """Hear SIGTERM and SIGINT."""
        before = {one: signal.signal(one, self.stop) for one in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def fitted(case: TabularCase, seed: int, progress: bool | Progress = False) -> SimulatedFit:
    """The case trained on shares."""
    data = dataset(case.data, seed, case.objective == "mse", case.objective == "binary")
    grown: dict[str, Any] = {}
    if case.bins:
        data, grown = in_bins(data, case.bins), {"momentum": 0.0, "schedule": "constant"}
    batch = len(data.train_x) if case.bins else case.batch
    model = (
        small_vit() if case.layers == [SMALL_VIT] else model_of_list(case.layers, data.train_x.shape[1], data.classes)
    )
    job = PrivateJob.from_json(
        {
            "model": model_to_json(model),
            "steps": -(-case.epochs * len(data.train_x) // batch),
            "batch": batch,
            "lr": case.lr,
            "objective": case.objective,
            "reveal": [case.metric],
            "test_rows": len(data.test_x),
            "seed": seed,
            **grown,
        }
    )
    return train(job, data, progress=progress)


def in_bins(data: Dataset, bins: int) -> Dataset:
    """The same rows as bits, by quantiles of the training rows."""
    edges = [edges_of(column, bins) for column in data.train_x.T]

    def bits(x: Floats) -> Floats:
        return np.stack([one for column, e in zip(x.T, edges, strict=True) for one in bits_of(column, e)], 1)

    return replace(data, train_x=bits(data.train_x), test_x=bits(data.test_x))


@dataclass(frozen=True, slots=True)
class Seed:
    """One seed of a case: what was trained on shares, and the metric of the training in clear."""

    made: SimulatedFit
    clear: float


def one_seed(name: str, case: TabularCase, seed: int, watch: TableProgress) -> Seed:
    """Train it both ways. Raises StoppedError."""
    watch.begin(f"{name}, seed {seed}")
    made = fitted(case, seed, watch.step)
    return Seed(made, made.twin().metrics[case.metric])


def case_rows(name: str, case: TabularCase, seeds: Sequence[Seed]) -> list[Row]:
    """The metric beside the clear one, by how much it is worse seed by seed, and what the private training costs."""
    made, clear = [one.made for one in seeds], [one.clear for one in seeds]
    private = [one.metrics[case.metric] for one in made]
    kind, unit = ("ratio", "deviations") if case.metric == "rmse" else ("share", case.metric)
    pairs = list(zip(private, clear, strict=True))
    behind = [p / c - 1.0 if case.metric == "rmse" else c - p for p, c in pairs]
    rounds = [one.rounds / one.job.steps for one in made]
    return [
        row(name, kind, unit, private, statistics.median(clear)),
        held(row(f"{name}_behind", "share", "of it" if kind == "ratio" else unit, behind), BARS[case.metric]),
        row(f"{name}_epoch", "seconds", "s", [one.seconds / case.epochs for one in made]),
        row(f"{name}_step", "seconds", "s", [one.seconds / one.job.steps for one in made]),
        row(f"{name}_step", "rounds", "rounds", rounds),
        row(f"{name}_step", "bytes", "B", [one.bytes_sent / one.job.steps for one in made]),
    ]


def measured(cases: Mapping[str, TabularCase], runs: int, watch: TableProgress) -> tuple[list[Row], bool]:
    """The rows of all cases, each of so many seeds, and whether that is all: after a signal they are those of the
    seeds that are done, and of a case that has none what a step of it took."""
    found: list[Row] = []
    for name, case in cases.items():
        seeds: list[Seed] = []
        try:
            with watch.of_signals():
                for seed in range(1, runs + 1):
                    seeds.append(one_seed(name, case, seed, watch))
        except StoppedError:
            partial = [row(f"{name}_step", "seconds", "s", [watch.step_s])] if watch.done else []
            return [*found, *(case_rows(name, case, seeds) if seeds else partial)], False
        found += case_rows(name, case, seeds)
    return found, True


def main(argv: Sequence[str]) -> int:
    """Print the table; 0 if every case is within its bar, else 1, as where it was stopped."""
    made = RaisingParser(prog="uvcc-engine bench tabular", description=__doc__)
    made.add_argument("--case", action="append", default=[], help=f"only this one: {', '.join(CASES)}")
    made.add_argument("--runs", type=natural, default=3, help="seeds per case; each is another split and another start")
    made.add_argument("--epochs", type=int, default=0, help="train so many instead of each case's own; trees: so many")
    made.add_argument("--json", action="store_true")
    args = made.parse_args(argv)
    if unknown := sorted(set(args.case) - set(CASES)):
        raise ConfigError(f"unknown case {unknown[0]!r}", f"one of: {', '.join(CASES)}")
    if args.runs < 1 or args.epochs < 0:
        raise ConfigError(
            f"--runs {args.runs} --epochs {args.epochs}", "one run at least; without --epochs all of them"
        )
    cases = {name: replace(CASES[name], epochs=args.epochs or CASES[name].epochs) for name in args.case or CASES}
    rows, whole = measured(cases, args.runs, TableProgress())
    print(to_json(rows) if args.json else to_text(rows))
    if not whole:
        print("bench tabular: stopped; these rows are what was done", file=sys.stderr)
    return 0 if whole and all(one.met is not False for one in rows) else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
