"""The language-model worker: from a spec (agent) or a config name (torchrun) to a run directory."""

from __future__ import annotations

import faulthandler
import math
import os
import platform
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from uvcc_engine import __version__
from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ConfigError, PeerLostError, UvccError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.machine import installed_code
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.narrate import Narrator
from uvcc_engine.contract.run_files.writer import RunWriter, Ticker
from uvcc_engine.contract.text import clean
from uvcc_engine.nsa.model import LanguageModel, parameter_count
from uvcc_engine.train import config as lm_config
from uvcc_engine.train import effective, fp8_products, lm_state, memory_plan, repeated
from uvcc_engine.train import env as lm_env
from uvcc_engine.train.allocator import keep_memory
from uvcc_engine.train.check import check
from uvcc_engine.train.dimensions.sharded import assembled
from uvcc_engine.train.distributed import RankGroup, choose_device, nvidia_driver, start_group, stop_group, vram_mib
from uvcc_engine.train.lm_job import check_plan, check_world, overrides, resolve
from uvcc_engine.train.loop import LmTrainer
from uvcc_engine.train.only_training import only_training
from uvcc_engine.train.sinks import sink_registry
from uvcc_engine.train.sinks.printed_rows import PrintedRows
from uvcc_engine.train.sinks.sink_feed import Sinks, sinks_of
from uvcc_engine.train.telemetry import write_env
from uvcc_engine.train.text.data import Cursor, Packer
from uvcc_engine.train.text.sources import make_source
from uvcc_engine.train.text.tokenizer import Tokenizer, tokenizer_of
from uvcc_engine.train.trained import exported, generate
from uvcc_engine.train.watchdog import Watchdog

SAME_PRESS_S: Final = 3.0


def train(
    cfg: lm_config.LMConfig,
    directory: Path,
    run: str,
    *,
    coord: str = "",
    lead: bool | None = None,
    effects: list[lm_env.Effect] | None = None,
    start: int = -1,
    progress: bool = False,
) -> int:
    """Run this rank to its end; the exit code. Auto-resumes from the newest checkpoint of this run.

    ``lead``: whether this rank writes the directory's tables; by default rank 0 does. ``start``: see WorkerSpec.
    ``progress``: rank 0 prints every logged row, for whoever started it by hand.
    Raises VerificationError naming the file if that checkpoint was altered: an older one is the operator's decision.
    """
    check_world(cfg, int(os.environ.get("WORLD_SIZE", "1")))
    sink_registry.check(sink_registry.names_in(cfg.train.sinks))
    effective.take(os.environ)
    group = start_group(cfg.runtime.device, cfg.ddp.timeout_min, cfg.ddp.tensor, cfg.ddp.context)
    if not cfg.ddp.shard and cfg.ddp.context == 1:  # whose further groups are made later
        effective.take(os.environ, grouped=True)
    if group.device.type == "cpu":
        keep_memory()
    root = directory / files.CHECKPOINTS
    manifest = lm_state.common(group, root, run, start)
    resume_step = manifest.step if manifest else None
    aside = _set_aside(group, root, start) if start >= 0 else ""
    if group.rank == lm_state.sharers(root, group)[0]:
        ck.drop_unfinished(root)
    where = coord or f"p0r{group.rank}s0t0"
    leads = group.lead if lead is None else lead
    again = repeated.recorded(directory, group, cfg, resume_step, aside, leads=leads)
    with RunWriter.open(directory, run, group.rank, where, lead=leads, resume_step=resume_step) as writer:
        writer.told = Narrator().tell
        writer.told("worker_start", "info", {"coord": where, "run": run, "pid": os.getpid(), "world": group.world})
        asked = _signals(directory, group.rank, by_hand=progress)

        def describe() -> None:
            if leads:
                facts = _facts(cfg, group, effects or [])
                writer.describe(facts)
                write_env(directory, {k: facts[k] for k in ("python", "torch", "cuda", "device", "gpu")})

        if manifest is None:  # else once the checkpoint was found to fit: the next resume takes its config from there
            describe()
        if aside:
            writer.event("checkpoints_set_aside", level="warn", after=start, folder=aside)

        def on_stall(age: float, threshold: float, dump: str) -> None:
            writer.event("watchdog_dump", level="warn", age_s=round(age, 1), threshold_s=round(threshold, 1), dump=dump)

        watchdog = Watchdog(directory, group.rank, on_stall)
        goes_on = resume_step is not None
        with Ticker(writer, group.trace.waiting_on), sinks_of(cfg, writer, by_hand=not coord, goes_on=goes_on) as sinks:
            watchdog.start()
            try:
                rows = PrintedRows(cfg.train.steps) if progress and group.lead else None
                args = (manifest, describe, asked, watchdog, effects or [], rows, sinks, again)
                return _train(cfg, group, writer, *args)
            finally:
                watchdog.stop()
                stop_group(group)


def _train(
    cfg: lm_config.LMConfig,
    group: RankGroup,
    writer: RunWriter,
    manifest: ck.CheckpointManifest | None,
    describe: Callable[[], None],
    asked: list[int],
    watchdog: Watchdog,
    effects: Sequence[lm_env.Effect],
    rows: PrintedRows | None,
    sinks: Sinks,
    again: repeated.Repeated,
) -> int:
    source = make_source(cfg.data, cfg.train.seed)

    def packer(val: bool, cursor: Cursor | None) -> Packer:
        return Packer(
            source,
            tokenizer,
            seq_len=cfg.train.seq_len,
            rank=group.replica,
            world=group.replicas,
            val=val,
            val_percent=cfg.data.val_percent,
            cursor=cursor,
            retries=cfg.data.retries,
        )

    began, trainer = manifest.step if manifest else 0, None

    def reached() -> int:
        return max(trainer.steps_done, began) if trainer is not None else began

    try:
        tokenizer = tokenizer_of(cfg.data, cfg.model.vocab)
        trainer = LmTrainer(
            cfg,
            group,
            writer,
            tokenizer,
            packer,
            stop_asked=lambda: bool(asked),
            on_alive=lambda stepped: watchdog.beat(stepped=stepped),
            on_wrapped=lambda model: _prove(writer, effective.read_back(effects, cfg, model)),
            on_row=rows.show if rows else lambda step, row: None,
            on_curves=sinks.log,
            again=again,
        )
        if manifest:
            trainer.resume_from(manifest)
            describe()
            writer.event("resumed", step=manifest.step, checkpoint=manifest.sha256)
        elif cfg.train.init:
            taken = exported.start_from(trainer.model, Path(cfg.train.init).expanduser())
            writer.event("weights_taken", folder=cfg.train.init, sha256=taken)
        writer.event("party_start", step=trainer.steps_done, world=group.world)
        writer.heartbeat(trainer.steps_done, "start", "boot")
        outcome = trainer.run()
    except UvccError as error:
        writer.event("run_failed", level="error", error=error.what, hint=error.hint)
        writer.exit("failed", step=reached(), error=error)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (RuntimeError, MemoryError) as error:
        traceback.print_exc()
        named = name_failure(error, group)
        writer.event("peer_lost" if isinstance(named, PeerLostError) else "run_failed", level="error", error=named.what)
        writer.exit("failed", step=reached(), error=named)
        return named.exit_code
    if outcome.status == "done":
        writer.result(outcome.tensors_sha256, {"loss": outcome.loss} if math.isfinite(outcome.loss) else {})
        if cfg.train.sample_tokens:
            model = assembled(trainer.model)  # every rank gives its part
            if writer.lead:
                _write_sample(model, tokenizer, cfg.train.sample_tokens, writer)
        writer.event("run_done", step=outcome.step, tensors_sha256=outcome.tensors_sha256)
    writer.exit(outcome.status, step=outcome.step, checkpoint=outcome.checkpoint)
    sinks.status = outcome.status
    return 0


def _write_sample(model: LanguageModel, tokenizer: Tokenizer, most: int, writer: RunWriter) -> None:
    """Let the finished model write a text: ``sample.txt``, and its beginning in an event."""
    made = generate.continue_text(model.eval(), tokenizer, "", most, generate.Sampling(seed=writer.rank))
    files.write_atomic(writer.directory / files.SAMPLE, made.text.encode())
    writer.event("sample_written", text=clean(made.text, files.SAMPLE_SHOWN), tokens=made.tokens)


def name_failure(error: RuntimeError | MemoryError, group: RankGroup) -> UvccError:
    """What torch's error means for the operator: memory, a lost rank (gloo and NCCL raise RuntimeError), or the step.

    Of gloo's text only the fact is kept; the whole is in the rank's log.
    """
    text = str(error).partition("\n")[0].partition(" This is typically")[0] or type(error).__name__
    if out_of_memory(error):
        where = "GPU memory" if group.device.type == "cuda" else "memory"
        return UvccError(f"out of {where}: {text}", memory_plan.HINT)
    if group.trace.inside and group.world > 1:
        hint = "look at the other ranks' exit.json, then resume from the last checkpoint"
        return PeerLostError(f"a collective failed in {group.trace.last}: {text}", hint)
    return UvccError(f"the step failed: {text}", "the stack is in this rank's log; resume from the last checkpoint")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. Torch's CPU allocator raises a plain RuntimeError, and nothing but its words tells it
    from the others: this is the one place that reads them.
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def _set_aside(group: RankGroup, root: Path, start: int) -> str:
    """Move what is later than the step that was decided on out of the way, tables included; the folder's name."""
    moved = None
    if group.rank == lm_state.sharers(root, group)[0]:
        moved = ck.set_aside(root, start, also=[root.parent / name for name in (files.TRAINING, files.VAL)])
    group.barrier()
    return moved.name if moved else ""


def _prove(writer: RunWriter, values: dict[str, str]) -> None:
    """Say what the environment was found to have set, in this rank."""
    if values:
        writer.event("environment_proven", values=values)


def _signals(directory: Path, rank: int, *, by_hand: bool = False) -> list[int]:
    """SIGTERM and, ``by_hand``, ctrl-c ask for a halt; SIGUSR1 dumps every thread's stack. Returns the list that a
    request appends to.

    Under torchrun one ctrl-c arrives twice, from the terminal and handed on; a later one ends the rank at once.
    """
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    pressed: list[float] = []

    def interrupted(number: int, frame: object) -> None:
        pressed.append(time.monotonic())
        if pressed[-1] - pressed[0] > SAME_PRESS_S:
            raise KeyboardInterrupt
        if len(pressed) == 1 and rank == 0:  # not print, which the signal may have come in the middle of
            os.write(sys.stderr.fileno(), b"halts behind this step, with a checkpoint; ctrl-c again leaves at once\n")
        asked.append(number)

    if by_hand and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupted)
    dump = (directory / f"stackdump_rank{rank}.txt").open("a")
    faulthandler.register(signal.SIGUSR1, dump, all_threads=True)
    return asked


def _facts(cfg: lm_config.LMConfig, group: RankGroup, effects: list[lm_env.Effect]) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else ""
    return {
        "kind": "lm",
        "version": __version__,
        "config": lm_config.to_mapping(cfg),
        "parameters": parameter_count(cfg.model),
        "world": group.world,
        "backend": group.backend,
        "device": str(group.device),
        "gpu": gpu,
        "gpu_memory_mib": vram_mib(),
        "driver": nvidia_driver(),
        "code_hash": installed_code.code_hash(),
        "launch": shlex.join(sys.orig_argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "environment": {e.name: f"{e.value} ({e.meaning})" for e in effects},
    }


def main(spec: WorkerSpec) -> int:
    """Entry point of the agent. ``spec.env`` carries RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    directory = Path(spec.dir)
    try:
        cfg, effects = lm_env.apply(resolve(spec.job, vram_mib=vram_mib()), os.environ)
        check_plan(cfg, spec.job.get("plan") or {})
        return train(cfg, directory, spec.run, coord=spec.coord, lead=spec.lead, effects=effects, start=spec.start)
    except UvccError as error:
        with RunWriter.open(directory, spec.run, spec.rank, spec.coord, lead=spec.lead) as writer:
            writer.exit("failed", error=error)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _check_ranks(cfg: lm_config.LMConfig, ranks: int) -> None:
    """Refuse what every rank would refuse: there it would stand among torchrun's own words."""
    check_world(cfg, ranks)
    sink_registry.check(sink_registry.names_in(cfg.train.sinks))
    fp8_products.check_device(cfg.runtime.precision, choose_device(cfg.runtime.device, 0))


def _under_torchrun(ranks: int, directory: Path, argv: list[str]) -> None:
    """Become torchrun with ``ranks`` processes of this command on this host, which meet at a free port."""
    launched = [sys.executable, "-m", "uvcc_engine.train.launched", str(directory), str(ranks)]
    launcher = [*launched, "--standalone", f"--nproc-per-node={ranks}"]
    os.execv(sys.executable, [*launcher, "-m", "uvcc_engine.cli", "train", *argv])


def cli(argv: list[str]) -> int:
    """``uvcc-engine train CONFIG --out DIR``: on one GPU or a CPU in this process, on several under torchrun."""
    parser = RaisingParser(prog="uvcc-engine train", description="train the language model")
    parser.add_argument(
        "config", nargs="?", help="a packaged config (train_showcase, m7c_125m_80g, ...) or a YAML file"
    )
    parser.add_argument("--out", type=Path, help="run directory")
    parser.add_argument(
        "--resume", type=Path, metavar="PATH", help="go on in this run directory, or from this checkpoint of one"
    )
    parser.add_argument("--check", action="store_true", help="only say whether it can run here, and what it will need")
    parser.add_argument("--run", default="", help="run id (default: the directory's name)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    parser.add_argument("--ranks", type=int, default=0, help="processes (default: one per visible GPU)")
    args = parser.parse_args(argv)
    if args.resume is not None and (args.config or args.out or args.run):
        parser.error("--resume takes config, directory and run id from what it goes on from; give it alone")
    if args.resume is None and not args.config:
        parser.error("name a config, or --resume a run")
    start, recorded = -1, 0
    if args.resume is not None:
        args.out, start = _resumed_at(args.resume)
        facts, _ = exported.run_facts(args.out)
        args.config, args.run, recorded = facts["config"], str(facts.get("run", "")), int(facts.get("world") or 1)
    job = {"config": args.config, "overrides": overrides(args.set)}
    if args.check:
        facts = check(job, int(os.environ.get("WORLD_SIZE", args.ranks or 1)), os.environ)
        print("\n".join(f"{key}: {value}" for key, value in facts.items()))
        _warn_of_warmup(resolve(job, vram_mib=vram_mib()))
        return 0
    if args.out is None:
        raise ConfigError("--out is missing", "name the run directory")
    _check_directory(args.out)
    cfg, effects = lm_env.apply(resolve(job, vram_mib=vram_mib()), os.environ)
    ranks = args.ranks or max(1, torch.cuda.device_count())
    if not args.ranks and (cfg.runtime.device == "cpu" or not torch.cuda.device_count()):
        ranks = recorded or 1
    launches = "WORLD_SIZE" not in os.environ and ranks > 1
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if "WORLD_SIZE" not in os.environ:  # once, and not by each of torchrun's
        _warn_of_warmup(cfg)
    if launches:
        _check_ranks(cfg, ranks)
    elif first:  # through an agent, the console's preflight has asked
        memory_plan.check(cfg, int(os.environ.get("WORLD_SIZE", "1")), choose_device(cfg.runtime.device, 0))
    with only_training(args.out, leads=int(os.environ.get("RANK", "0")) == 0):
        if launches:
            _under_torchrun(ranks, args.out, argv)
        if first:  # before the ranks meet, so before any of them looks
            _drop_old_halt(args.out)
        return train(cfg, args.out, args.run or files.run_id_of(args.out), effects=effects, start=start, progress=True)


def _warn_of_warmup(cfg: lm_config.LMConfig) -> None:
    """Say that the rate will not be reached. No refusal: a few steps of a packaged config are how one tries it."""
    if cfg.train.warmup > cfg.train.steps:
        what = f"train.warmup={cfg.train.warmup} is more than train.steps={cfg.train.steps}"
        print(f"warning: {what}: the learning rate never reaches train.lr={cfg.train.lr:g}", file=sys.stderr)


def _check_directory(path: Path) -> None:
    """Raises ConfigError where ``path`` or something above it is no directory, but there."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        raise ConfigError(f"--out {path}: {there} is no directory", "name a directory, or a new one")


def _drop_old_halt(directory: Path) -> None:
    """Take back what halted an earlier start: it would halt this one at its first step.

    A request that came after this process began is obeyed. When that was follows from the processor time that imports
    took, which is no more than what passed.
    """
    path = directory / files.HALT
    try:
        if path.stat().st_mtime < time.time() - time.process_time():
            path.unlink()
            print(f"{path} of an earlier start is taken back")
    except FileNotFoundError:
        return


def _resumed_at(path: Path) -> tuple[Path, int]:
    """The run directory that ``path`` means, and the step of the checkpoint that it names; -1 for the newest.

    Raises ConfigError where there is neither.
    """
    path = path.resolve()
    if path.parent.name == files.CHECKPOINTS and (step := ck.step_of(path)) is not None:
        if not path.is_dir():
            there = ", ".join(map(str, ck.steps_present(path.parent))) or "none"
            raise ConfigError(f"there is no checkpoint {path}", f"there are those of steps {there}")
        return path.parent.parent, step
    if not (path / files.RUN_JSON).is_file():
        hint = f"name a directory with {files.RUN_JSON}, or a {files.CHECKPOINTS}/step-N in one"
        raise ConfigError(f"{path} is no run that can be resumed", hint)
    return path, -1
