"""``bench usefulness``: what small models of bytes learn in minutes on two cores, through the product's own commands.

Packaged configs are trained one after the other by ``uvcc-engine train`` and exported. ``learn_text``: native sparse
attention and its dense twin on the manual that each Python carries; the loss on held-out documents after equally many
steps. ``learn_letters``: letters hidden in that text are asked for out of reach of the window; the share that is found,
by native sparse attention, by the dense twin, and by the window alone. Last, a process of its own continues a text from
the exported folder.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.machine.benchrows import Row, held, row, to_json, to_text
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.run_files import files
from uvcc_engine.train.text.hidden_letters import ASKED, LONGEST

TEXT, LETTERS = "learn_text", "learn_letters"
TRAININGS: Final = ((TEXT, "nsa"), (TEXT, "dense"), (LETTERS, "nsa"), (LETTERS, "dense"), (LETTERS, "window"))
WORSE: Final = 1.02  # the most that the held-out loss may be of the dense twin's
FOUND: Final = 0.95  # the least share of letters
GUESSED: Final = 0.2  # the most that the window alone may find; chance is an eighth
LENGTH: Final = str(LONGEST + ASKED + 1)  # the longest row of one document that is trained on
WROTE: Final = 120  # tokens of the text


@dataclass(frozen=True, slots=True)
class Learned:
    """A finished training: the exported folder, the last loss on held-out documents, the share of letters found, and
    the seconds that the training took."""

    folder: Path
    val_loss: float
    found: float
    seconds: float


def command(*arguments: str) -> str:
    """Standard output of ``uvcc-engine`` in a process of its own. Raises UvccError with its last line if it fails."""
    line = [sys.executable, "-m", "uvcc_engine.cli", *arguments]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(line, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UvccError(f"uvcc-engine {arguments[0]} failed: {said[-1] if said else done.returncode}", "see above")
    return done.stdout


def learn(config: str, attention: str, folder: Path, sets: Sequence[str]) -> Learned:
    """Train, export and score one model below ``folder``."""
    run, model = folder / f"{config}-{attention}", folder / f"{config}-{attention}-model"
    more = [part for pair in (f"model.attention={attention}", *sets) for part in ("--set", pair)]
    began = time.monotonic()
    command("train", config, "--out", os.fspath(run), *more)
    seconds = time.monotonic() - began
    command("export", os.fspath(run), "--out", os.fspath(model))
    with (run / files.VAL).open() as table:
        loss = float(list(csv.DictReader(table))[-1]["loss"])
    found = float("nan")
    if config == LETTERS:
        (score,) = json.loads(command("evaluate", os.fspath(model), "--task", "letters", "--length", LENGTH, "--json"))
        found = float(score["value"])
    return Learned(model, loss, found, seconds)


def measure(folder: Path, sets: Sequence[str], say: Callable[[str], None]) -> list[Row]:
    """All figures; ``say`` hears of each training, and the text that was written."""
    models: dict[tuple[str, str], Learned] = {}
    for config, attention in TRAININGS:
        one = models[config, attention] = learn(config, attention, folder, sets)
        found = f", {one.found:.1%} of the letters" if config == LETTERS else ""
        say(f"{config} {attention}: held-out loss {one.val_loss:.4f}{found} ({one.seconds:.0f} s)")
    text, twin = models[TEXT, "nsa"], models[TEXT, "dense"]
    loss = row("text_val_loss", "loss", "nats", [text.val_loss], twin.val_loss)
    rows = [held(loss, WORSE * twin.val_loss)]
    for attention in ("nsa", "dense", "window"):
        share = row(f"letters_{attention}", "found", "", [models[LETTERS, attention].found])
        rows.append(held(share, GUESSED) if attention == "window" else held(share, FOUND, at_least=True))
    rows += [row(f"seconds_{c}_{a}", "seconds", "s", [m.seconds]) for (c, a), m in models.items()]
    asked = ("generate", os.fspath(text.folder), "--prompt", "The ", "--tokens", str(WROTE), "--temperature", "0.5")
    say(f"the text model writes: {command(*asked).strip()}")
    return rows


def main(argv: Sequence[str]) -> int:
    """Exit code 1 if a bar was missed."""
    parser = RaisingParser(prog="uvcc-engine bench usefulness", description=__doc__)
    parser.add_argument("--out", type=Path, help="keep runs and models in this new folder")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key in all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if args.out is not None and args.out.exists():
        raise ConfigError(f"{args.out} exists", "name a new folder")
    with tempfile.TemporaryDirectory(prefix="uvcc-usefulness-") as made:
        rows = measure(args.out or Path(made), args.set, say)
    print(to_json(rows) if args.json else to_text(rows))
    return int(any(r.met is False for r in rows))
