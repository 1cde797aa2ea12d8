"""``uvcc-engine``: the pod side's command line. Each command is imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from uvcc_engine import __version__
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.machine import extras, help_text, standard_output
from uvcc_engine.contract.machine.raising_parser import RaisingParser

COMMANDS: Final = {
    "agent": ("uvcc_engine.agent.main", "supervise this pod's workers"),
    "worker": ("uvcc_engine.agent.foreground", "run one worker here: SPEC.json"),
    "train": ("uvcc_engine.train.worker:cli", "train a language model without a console"),
    "export": ("uvcc_engine.train.trained.generate:export_main", "a trained language model as a folder of its own"),
    "import": (
        "uvcc_engine.train.trained.arcee",
        "a model that Hugging Face's transformers saved, as export writes one",
    ),
    "generate": ("uvcc_engine.train.trained.generate", "continue a text with a trained language model"),
    "data": (
        "uvcc_engine.train.text.source_probe",
        "a training's data source: data probe|prepare CONFIG",
    ),
    "relay": ("uvcc_engine.relay.__main__", "store and forward the parties' sealed messages"),
    "share": ("uvcc_engine.owner.client", "split inputs and seal each share to its party"),
    "ask": ("uvcc_engine.owner.asking", "a client's: make a key, ask a model that three domains serve"),
    "align": ("uvcc_engine.owner.align", "find the rows of which several owners hold different columns"),
    "seal": ("uvcc_engine.owner.seal", "split and seal an owner's rows for one proposal, in bounded memory"),
    "table": ("uvcc_engine.owner.own_data", "the data owner's: a schema from a CSV file, predictions in clear"),
    "rehearse": ("uvcc_engine.simulate.step_rehearsal", "what a step of a private job costs, from made-up rows"),
    "gpt": (
        "uvcc_engine.simulate.private_gpt",
        "a private GPT by three simulated parties, beside its clear twin, and a text from it",
    ),
    "base": ("uvcc_engine.simulate.public_base", "train a public base in clear, for private jobs around it"),
    "audit": ("uvcc_engine.owner.audit", "the data owner's: replay a run from its seeds, name who strayed"),
    "form": (
        "uvcc_engine.owner.program_form",
        "whether a run's messages have the very form of the agreed program",
    ),
    "verify": ("uvcc_engine.transcript.proof.cli", "check a run, its artifacts or a proof bundle"),
    "prove": ("uvcc_engine.transcript.proof.leaf_proof", "one leaf of a transcript is in what was signed; checks such"),
    "open": ("uvcc_engine.transcript.proof.leaf_proof:open_main", "the same with the message itself, at its party"),
    "evaluate": (
        "uvcc_engine.train.trained.evaluate",
        "what a trained language model can do: perplexity, needle, copying",
    ),
    "selftest": ("uvcc_engine.agent.selftest", "check that this installation can do its work"),
    "longctx": ("uvcc_engine.nsa.longctx", "one attention layer over 65,536 tokens: time, blocks read, memory"),
    "bench": ("uvcc_engine.bench", "measure: bench NAME [--json]"),
}
"""Name -> (module with ``main(argv) -> int``, or ``module:function``; what it does)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. An error is one line on standard error, with its hint."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return standard_output.guarded(lambda: _run(args))
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(args: list[str]) -> int:
    if args and args[0] in COMMANDS:
        if args[0] == "bench":
            return _bench(args[1:])
        return _main_of(args[0], COMMANDS[args[0]][0])(args[1:])
    if args and not args[0].startswith("-"):
        raise ConfigError(f"unknown command {args[0]!r}", _near(args[0], COMMANDS, "see: uvcc-engine --help"))
    parser = _parser()
    parser.parse_args(args)
    parser.print_help()
    return 0


def _near(word: str, known: Iterable[str], otherwise: str) -> str:
    from uvcc_engine.contract.parsing.suggest import CLOSE, did_you_mean

    return did_you_mean(word, known, otherwise, CLOSE)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS)) + 2
    listed = "\n".join(f"  {name:<{width}}{about}" for name, (_, about) in COMMANDS.items())
    parser = RaisingParser(
        prog="uvcc-engine",
        usage="uvcc-engine COMMAND [options]",
        description="The side of UVCC that runs on pods.",
        epilog=f"commands:\n{listed}\n\nuvcc-engine COMMAND --help tells more.",
        formatter_class=help_text.HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def _bench(args: list[str]) -> int:
    folder = Path(__file__).parent / "bench"
    names = sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))
    all_names = f"one of: {', '.join(names) or 'none'}"
    if not args:
        raise ConfigError("the following arguments are required: NAME", all_names)
    if args[0] in ("-h", "--help"):
        listed = f"benchmarks: {', '.join(names) or 'none'}"
        print(f"usage: uvcc-engine bench NAME [--json]\n\n{help_text.filled(listed, help_text.width())}")
        return 0
    if args[0] not in names:
        raise ConfigError(f"unknown benchmark {args[0]!r}", _near(args[0], names, all_names))
    run = _main_of(f"bench {args[0]}", f"uvcc_engine.bench.{args[0]}")
    # a benchmark ends what it has started on its way out, which SIGTERM by itself would not let it
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return run(args[1:])
    finally:
        signal.signal(signal.SIGTERM, before)


def _main_of(command: str, module: str) -> Callable[[list[str]], int]:
    """The command's main function. Raises UvccError if this installation lacks something it needs."""
    name, _, function = module.partition(":")
    try:
        found = getattr(importlib.import_module(name), function or "main")
    except (ImportError, AttributeError) as error:
        what = f"uvcc-engine {command} is not available: {error}"
        raise UvccError(what, extras.hint_for(error) or "install the package with what this command needs") from error
    return lambda argv: int(found(argv) or 0)


if __name__ == "__main__":
    sys.exit(main())
