"""``bench tabular``: private training beside the same training in clear, on the data sets that scikit-learn ships.

``covertype`` is made up: 100,000 rows of as many columns as the real one has, which has to be downloaded. Three
parties in one process (``simulate``); the same rows, order, start and schedule in float64 beside them. Held out is
every fifth row by the job's seed. AUC within 0.005, accuracy within one point, RMSE within 1 % of the clear one's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from uvcc_engine.bench.work.small_vit import small_vit
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.machine import extras
from uvcc_engine.contract.machine.benchrows import Row, held, row, to_json, to_text
from uvcc_engine.data.bins import bits_of, edges_of
from uvcc_engine.data.sets import Dataset, Floats, split
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.simulate import SimulatedFit, train

SMALL_VIT: Final = "small vision transformer"
COVERTYPE_ROWS: Final = 100_000
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
    "digits_vit": TabularCase("digits", [SMALL_VIT], "accuracy", 16, batch=64, lr=0.05),
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


def fitted(case: TabularCase, seed: int) -> SimulatedFit:
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
    return train(job, data)


def in_bins(data: Dataset, bins: int) -> Dataset:
    """The same rows as bits, by quantiles of the training rows."""
    edges = [edges_of(column, bins) for column in data.train_x.T]

    def bits(x: Floats) -> Floats:
        return np.stack([one for column, e in zip(x.T, edges, strict=True) for one in bits_of(column, e)], 1)

    return replace(data, train_x=bits(data.train_x), test_x=bits(data.test_x))


def case_rows(name: str, seeds: Sequence[int]) -> list[Row]:
    """The metric beside the clear one, by how much it is worse seed by seed, and what the private training costs."""
    case, made = CASES[name], [fitted(CASES[name], seed) for seed in seeds]
    private = [one.metrics[case.metric] for one in made]
    clear = [one.twin().metrics[case.metric] for one in made]
    kind, unit = ("ratio", "deviations") if case.metric == "rmse" else ("share", case.metric)
    pairs = list(zip(private, clear, strict=True))
    behind = [p / c - 1.0 if case.metric == "rmse" else c - p for p, c in pairs]
    rounds = [one.rounds / one.job.steps for one in made]
    return [
        row(name, kind, unit, private, statistics.median(clear)),
        held(row(f"{name}_behind", "share", "of it" if kind == "ratio" else unit, behind), BARS[case.metric]),
        row(f"{name}_epoch", "seconds", "s", [one.seconds / case.epochs for one in made]),
        row(f"{name}_step", "rounds", "rounds", rounds),
        row(f"{name}_step", "bytes", "B", [one.bytes_sent / one.job.steps for one in made]),
    ]


def main(argv: Sequence[str]) -> int:
    """Print the table; 0 if every case is within its bar, else 1."""
    made = argparse.ArgumentParser(prog="bench tabular", description=__doc__)
    made.add_argument("--case", action="append", default=[], help=f"only this one: {', '.join(CASES)}")
    made.add_argument("--runs", type=int, default=3, help="seeds per case; each is another split and another start")
    made.add_argument("--json", action="store_true")
    args = made.parse_args(argv)
    if unknown := sorted(set(args.case) - set(CASES)):
        raise ConfigError(f"unknown case {unknown[0]!r}", f"one of: {', '.join(CASES)}")
    rows = [one for name in args.case or CASES for one in case_rows(name, range(1, args.runs + 1))]
    print(to_json(rows) if args.json else to_text(rows))
    return 0 if all(one.met is not False for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
