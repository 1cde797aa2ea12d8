"""``uvcc-engine base``: train a small language model on a public text, in clear, and write it as a public base.

A private job is then made around it: ``job.base`` names the file, ``job.adapters`` says what of it is trained in secret
on a text that nobody else may see, and the schema that is written beside the base says what letters that text may
have. Without ``--text`` it learns the beginning of *Coriolanus*, which ships.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.owner_files import schema_beside
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.schema import NEXT, Schema, TextPlan
from uvcc_engine.data.schema_text import schema_text
from uvcc_engine.data.sets import Floats, Ints, one_hot
from uvcc_engine.data.text_windows import infer_text, read_text
from uvcc_engine.model.definition.base_model import write_base
from uvcc_engine.model.definition.specs import ModelSpec, check_model, gpt, initial_weights
from uvcc_engine.model.learning.plaintext import forward
from uvcc_engine.simulate.private_gpt import LETTERS, SHIPPED

_START_BITS: Final = 16
_HELD_OUT: Final = 0.1


def train_base(
    model: ModelSpec, text: Ints, *, steps: int, batch: int, lr: float, seed: int = 7
) -> tuple[list[Floats], list[float]]:
    """Weights of a language model trained in clear by AdamW on windows of ``text`` (numbers of letters), and the mean
    loss of every step. Raises ConfigError for a text that is shorter than a window."""
    if len(text) <= model.positions + 1:
        raise ConfigError(f"a text of {len(text)} letters", f"give more than {model.positions + 1}")
    rng = np.random.default_rng(seed)
    weights = [torch.from_numpy(w).clone().requires_grad_() for w in initial_weights(model, seed, _START_BITS)]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    losses = []
    for _ in range(steps):
        starts = rng.integers(0, len(text) - model.positions, batch)
        loss = _loss(model, weights, text, starts)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return [w.detach().numpy() for w in weights], losses


def _loss(model: ModelSpec, weights: list[torch.Tensor], text: Ints, starts: Ints) -> torch.Tensor:
    windows = text[starts[:, None] + np.arange(model.positions + 1)]
    x = torch.from_numpy(one_hot(windows[:, :-1], model.classes))
    found = forward(model, weights, x, training=True)
    return torch.nn.functional.cross_entropy(found, torch.from_numpy(windows[:, 1:].reshape(-1)))


def loss_of(model: ModelSpec, weights: Sequence[Floats], text: Ints) -> float:
    """The mean loss of a model over the windows of a text, one behind the other."""
    starts = np.arange(0, len(text) - model.positions, model.positions)
    with torch.no_grad():
        return float(_loss(model, [torch.from_numpy(w) for w in weights], text, starts))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train and write; returns what is printed. Raises UvccError for what does not fit."""
    path, letters = (SHIPPED, LETTERS) if args.text is None else (args.text, infer_text(args.text)[0].values)
    letters = tuple(args.letters) if args.letters else letters
    if len(set(letters)) != len(letters):
        raise ConfigError("--letters names a letter twice", "each once")
    if min(args.width, args.heads, args.blocks, args.positions, args.steps, args.batch) < 1 or args.width % args.heads:
        raise ConfigError(f"width {args.width} in {args.heads} heads", "give sizes of at least 1 that the heads divide")
    text, digest = read_text(path, letters)
    held = int(len(text) * _HELD_OUT)
    model = gpt("base", len(letters), args.positions, args.width, args.heads, args.blocks)
    check_model(model)
    weights, losses = train_base(model, text[held:], steps=args.steps, batch=args.batch, lr=args.lr, seed=args.seed)
    sha256 = write_base(args.out, model, weights, letters)
    plan = TextPlan(args.positions, max(1, args.positions // 2))
    schema = Schema("next letter", letters, (), test=_HELD_OUT, kind=NEXT, text=plan)
    beside = schema_beside(args.out)
    about = f"{args.out.name}: what a secret text must be like that is learned around it."
    files.write_atomic(beside, schema_text(schema, about).encode())
    told: dict[str, Any] = {
        "file": str(args.out),
        "schema": str(beside),
        "sha256": sha256,
        "weights": sum(w.size for w in weights),
    }
    told |= {"letters": "".join(letters), "text_sha256": digest, "loss": losses[-1]}
    return told | ({"held_out_loss": loss_of(model, weights, text[:held])} if held > args.positions else {})


def main(argv: list[str]) -> int:
    """``uvcc-engine base``: returns the exit code; figures go to standard output as one JSON line."""
    parser = RaisingParser(prog="uvcc-engine base", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the file to write, like base.safetensors")
    parser.add_argument("--text", type=Path, help="a public text of your own; else the one that ships")
    parser.add_argument("--letters", default="", help="the letters it knows, also those of the secret text")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of attention and a wider layer")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--positions", type=int, default=32, help="letters of a window")
    parser.add_argument("--steps", type=natural, default=1000)
    parser.add_argument("--batch", type=int, default=32, help="windows of a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(argv)
    try:
        found = run(args)
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found))
    return 0
