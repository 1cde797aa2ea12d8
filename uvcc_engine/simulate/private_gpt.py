"""``uvcc-engine gpt``: a private GPT trained by three simulated parties beside its clear twin, and a text from it.

The curve of both losses is written as ``curve.csv``, and drawn where matplotlib is installed. Without ``--text`` it
learns the beginning of *Coriolanus*, which ships. Everything runs on this machine: rounds and bytes are those of a run,
seconds are of computing alone.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.schema import NEXT, Schema, TextPlan
from uvcc_engine.data.text_windows import infer_text, text_dataset
from uvcc_engine.model.definition.layer_list import model_to_json
from uvcc_engine.model.definition.specs import gpt
from uvcc_engine.model.shapes import MOST_SHARED
from uvcc_engine.simulate.deployment import Deployment, needs
from uvcc_engine.simulate.fitting import train
from uvcc_engine.simulate.generation import generate
from uvcc_engine.simulate.gpt_forecast import GptSize, foretell

SHIPPED: Final = Path(__file__).parents[1] / "data" / "shipped" / "coriolanus.txt"
LETTERS: Final = tuple(sorted("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"))
"""The 65 letters of the whole text; the part that ships has 60 of them."""
_CURVE: Final = "curve.csv"
_DRAWN: Final = "curve.svg"


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = RaisingParser(prog="uvcc-engine gpt", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--text", type=Path, help="a text of your own; else the one that ships")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of attention and a wider layer")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--positions", type=int, default=128, help="letters of a window")
    parser.add_argument("--steps", type=natural, default=20)
    parser.add_argument("--batch", type=int, default=4, help="windows of a step")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the three parties compute")
    parser.add_argument("--prompt", default="", help="what the trained model goes on from; else nothing is written")
    parser.add_argument("--letters", type=int, default=16, help="how many letters it writes")
    parser.add_argument("--out", type=Path, help=f"a folder for {_CURVE} and {_DRAWN}; needed to train")
    parser.add_argument(
        "--foretell", action="store_true", help="only what a step would cost, from small measured steps"
    )
    parser.add_argument("--vocabulary", type=int, help="letters of the model whose cost is foretold; else the text's")
    place = parser.add_argument_group("with --foretell: where it would run; one device a worker")
    for name, what in (("replicas", "data-parallel"), ("stages", "of the pipeline"), ("tensor", "ranks")):
        place.add_argument(f"--{name}", type=int, default=1, metavar="N", help=what)
    default = Deployment(Topology())
    place.add_argument("--one-way", type=float, default=default.one_way_s, help="seconds between two domains")
    place.add_argument("--link", type=float, default=default.link_bits, help="bits a second of a worker's link")
    place.add_argument("--ring-macs", type=float, default=default.ring_macs, help="a device's multiplications a second")
    place.add_argument("--dollars", type=float, default=default.dollars, help="of a device and hour")
    args: argparse.Namespace = parser.parse_args(argv)
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, write the curve, generate; returns what is printed. Raises UvccError for what does not fit."""
    if args.out is None:
        raise ConfigError("there is no folder for the curve", "name one with --out")
    path, letters = (SHIPPED, LETTERS) if args.text is None else (args.text, infer_text(args.text)[0].values)
    if args.width % max(1, args.heads) or min(args.positions, args.blocks, args.heads) < 1:
        raise ConfigError(f"width {args.width} in {args.heads} heads", "give a width that the heads divide")
    odd = [one for one in args.prompt if one not in letters]
    if odd:
        raise ConfigError(f"the prompt has {odd[0]!r}, which the text has not", "use letters of the text")
    stride = max(1, args.positions // 2)
    schema = Schema("next letter", letters, (), test=0.1, kind=NEXT, text=TextPlan(args.positions, stride))
    data, _ = text_dataset(path, schema)
    model = gpt("gpt", len(letters), args.positions, args.width, args.heads, args.blocks)
    values = {
        "steps": args.steps,
        "batch": args.batch,
        "lr": args.lr,
        "reveal": ["loss"],
        "test_rows": len(data.test_x),
        "device": args.device,
    }
    job = PrivateJob.from_json(json.loads(json.dumps({"model": model_to_json(model), **values})))
    found = train(job, data, progress=True, on=args.device)
    clear = found.twin()
    args.out.mkdir(parents=True, exist_ok=True)
    _write(args.out, found.losses, clear.losses)
    weights = sum(w.size for w in found.weights)
    told: dict[str, Any] = {
        "weights": weights,
        "steps": args.steps,
        "rounds": found.rounds / args.steps,
        "bytes_per_party": found.bytes_sent / PARTIES / args.steps,
        "seconds_per_step": found.seconds / args.steps,
        "loss": found.losses[-1],
        "clear_loss": clear.losses[-1],
        "furthest_apart": float(np.abs(np.array(found.losses) - np.array(clear.losses)).max()),
    }
    if args.prompt:
        made = generate(job, found.weights, [letters.index(one) for one in args.prompt], args.letters, on=args.device)
        told["text"] = args.prompt + "".join(letters[one] for one in made.tokens)
        told |= {"tokens_per_s": made.tokens_per_s, "rounds_per_token": made.rounds, "bytes_per_token": made.bytes_sent}
    return told


def _foretold(args: argparse.Namespace) -> dict[str, Any]:
    """What a step of a GPT of these sizes costs. Raises ConfigError for sizes that make no model."""
    letters = args.vocabulary or len(LETTERS)
    size = GptSize(letters, args.positions, args.width, args.heads, args.blocks, args.batch)
    if min(vars(args)[name] for name in _SIZES) < 1 or letters < 2 or args.width % args.heads:
        raise ConfigError(f"{size} is no model", "give sizes of at least 1, and a width that the heads divide")
    if args.one_way < 0 or min(args.link, args.ring_macs) <= 0 or args.dollars < 0:
        raise ConfigError("a link or a device that does nothing", "give rates above 0, and a delay and a price from 0")
    found = foretell(size)
    told = {"weights": size.weights, "rounds": found.rounds, "bytes_per_party": found.bytes_per_party}
    told |= {"macs_in_clear": size.macs, "checked_against_measured": found.check}
    place = Deployment(
        Topology(args.replicas, args.stages, args.tensor), args.one_way, args.link, args.ring_macs, args.dollars
    )
    need = needs(found, place)
    told |= {"devices": place.devices, "step_s": need.step_s} | asdict(need)
    return told | {"can_be_trained": max(size.vocabulary, size.positions) <= MOST_SHARED}


_SIZES: Final = ("positions", "width", "heads", "blocks", "batch", "replicas", "stages", "tensor")


def _write(folder: Path, private: Sequence[float], clear: Sequence[float]) -> None:
    """Both curves as a table, and as a picture where that can be drawn."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(["step", "private", "clear"])
    lines.writerows((k + 1, f"{a:.6f}", f"{b:.6f}") for k, (a, b) in enumerate(zip(private, clear, strict=True)))
    files.write_atomic(folder / _CURVE, out.getvalue().encode())
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(private) + 1)
    axes.plot(steps, private, label="three parties", linewidth=2)
    axes.plot(steps, clear, label="in clear", linestyle="--")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(folder / _DRAWN)


def main(argv: list[str]) -> int:
    """``uvcc-engine gpt``: returns the exit code; figures go to standard output as one JSON line."""
    args = _arguments(argv)
    try:
        found = _foretold(args) if args.foretell else run(args)
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found))
    return 0
