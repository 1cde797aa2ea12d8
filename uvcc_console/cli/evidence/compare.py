"""``uvcc compare A B``: two runs or packages side by side, both verified first."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from uvcc_console.cli import common
from uvcc_console.cli.evidence.verify import path_of
from uvcc_console.cli.main import FAILED, OK

if TYPE_CHECKING:
    from uvcc_engine.transcript.proof.bundle import Bundle
    from uvcc_engine.transcript.proof.compare import Comparison


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "compare",
        "Compare two runs, packages or bundles: the same job, the same data, the same run; else, where they part. Both "
        "are verified first. Exit code 0 if every root and result is equal, 1 if not.",
    )
    for name in ("one", "two"):
        parser.add_argument(name, help="a run, an archive, the folder of a phase, or a proof_bundle.json")
    parser.add_argument("--phase", default="", metavar="NAME", help="compare this phase (default: the full one)")
    parser.add_json()
    args = parser.parse_args(argv)
    from uvcc_engine.transcript.proof.compare import compare

    found = compare(*(_bundle(word, args.phase) for word in (args.one, args.two)))
    if args.json:
        common.emit(found.to_json())
    else:
        common.show("\n".join(_lines(found)))
    return OK if found.same_run else FAILED


def _bundle(word: str, phase: str) -> Bundle:
    """The verified bundle of the phase that decides. Raises VerificationError, UnreadableError."""
    from uvcc_console.report import received
    from uvcc_console.report.verify import pins_of
    from uvcc_engine.transcript.proof import package
    from uvcc_engine.transcript.proof.verifier import examine

    path = path_of(word)
    with contextlib.ExitStack() as folders:
        home = folders.enter_context(received.unpacked(path)) if received.is_archive(path) else path
        target = package.find(Path(home), phase)
        bundle, pins = target.deciding(), pins_of(home)
        signers = pins.of(target.decides) if pins is not None else None
        return examine(bundle, allowed_signers=signers)[1]


def _lines(found: Comparison) -> list[str]:
    def word(same: bool) -> str:
        return "the same" if same else "NOT the same"

    lines = [
        f"job        {word(found.same_job)}",
        f"data       {word(found.same_data)}" + ("" if found.same_data else " sealed inputs"),
        f"results    {word(found.same_results)}",
        f"epochs     {found.epochs[0]} and {found.epochs[1]}",
    ]
    if found.first is not None:
        epoch, workers = found.first
        more = f" and {len(workers) - 3} more" if len(workers) > 3 else ""
        lines.append(f"they part  in epoch {epoch}: {', '.join(workers[:3])}{more} signed another root")
    elif found.same_run:
        lines.append("run        bit by bit the same: every root and result is equal")
    lines += [f"value      {name}: {one} and {two}" for name, (one, two) in found.values.items()]
    lines += [f"policy     {name}: {str(a)[:70]} and {str(b)[:70]}" for name, (a, b) in found.policy.items()]
    return lines
