"""The training loop of the language model: plain, and every decision taken by all ranks together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from uvcc_engine.contract.checkpoints.checkpoint import CheckpointManifest
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.control import HaltRequest
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.nsa.blocks import doc_starts
from uvcc_engine.nsa.model import LanguageModel, route_of
from uvcc_engine.train import fp8_products, gradient_norm, lm_state
from uvcc_engine.train.config import LMConfig
from uvcc_engine.train.dimensions.context_ranks import context_of
from uvcc_engine.train.dimensions.sharded import part, part_again, shard, whole
from uvcc_engine.train.distributed import RankGroup, without_sync, wrap
from uvcc_engine.train.learning_rate import lr_at
from uvcc_engine.train.lm_job import check_world
from uvcc_engine.train.lm_optimizers import make_optimizers
from uvcc_engine.train.marks import check_marks, marked
from uvcc_engine.train.model_flops import effort_of
from uvcc_engine.train.repeated import Repeated
from uvcc_engine.train.rollback import NotFiniteError, Rollbacks
from uvcc_engine.train.telemetry import RankTelemetry
from uvcc_engine.train.text.data import Batch, Cursor, Packer, Prefetcher, doc_ids, inputs_and_labels
from uvcc_engine.train.text.tokenizer import Tokenizer

HOLD_POLL_S = 0.05
MOST_SKIPPED = 5  # steps in a row
_FINITE_HINT = "resume from the last checkpoint with a lower lr or runtime.precision: fp32"


@dataclass(frozen=True, slots=True)
class LoopOutcome:
    """How the loop ended: done | halted, after ``step`` optimizer steps, with the checkpoint it left."""

    status: str
    step: int
    checkpoint: str
    tensors_sha256: str
    loss: float


class LmTrainer:
    """One rank. ``packer(val, cursor)`` makes the data; ``clock`` is monotonic seconds; ``stop_asked`` is SIGTERM.

    ``on_alive(stepped)`` hears after every step, and without a step while held, evaluating or saving;
    ``on_wrapped(model)`` once, when the model stands as it is trained; ``on_row(step, row)`` with every logged row;
    ``on_curves(step, values)`` with what the curves get. ``again``: steps that are done a second time.
    """

    def __init__(
        self,
        cfg: LMConfig,
        group: RankGroup,
        writer: RunWriter,
        tokenizer: Tokenizer,
        packer: Callable[[bool, Cursor | None], Packer],
        *,
        clock: Callable[[], float] = time.perf_counter,
        stop_asked: Callable[[], bool] = lambda: False,
        pause: Callable[[float], None] = time.sleep,
        on_alive: Callable[[bool], None] = lambda stepped: None,
        on_wrapped: Callable[[nn.Module], None] = lambda model: None,
        on_row: Callable[[int, Mapping[str, float]], None] = lambda step, row: None,
        on_curves: Callable[[int, Mapping[str, float]], None] = lambda step, values: None,
        again: Repeated | None = None,
    ) -> None:
        check_world(cfg, group.world)
        check_marks(cfg.runtime.nvtx, group.device)
        fp8_products.check_device(cfg.runtime.precision, group.device)
        torch.manual_seed(cfg.train.seed)
        self.cfg, self.group, self.writer = cfg, group, writer
        self.model = LanguageModel(cfg.model).to(group.device)
        if cfg.runtime.precision == "fp8":
            fp8_products.use_in(self.model)
        self.model.recompute = cfg.runtime.recomputed(cfg.model.n_layers)
        if cfg.runtime.compile:
            self.model.compile_blocks()
        if cfg.ddp.shard and group.world > 1:  # before the optimizer, which is to see the parts
            shard(self.model, group.device, group.world, cfg.ddp.compress, group.tensor)
        if group.context > 1:
            self.model.context = context_of(group.device, group.rank, group.world, group.context)
        self.optimizer = make_optimizers(self.model, cfg.train)
        narrow = cfg.runtime.narrow
        effort = effort_of(cfg.model, cfg.train.seq_len, group.device, group.world, bf16=narrow)
        self.telemetry = RankTelemetry(writer, group.device, clock, effort, on_curves)
        self.steps_done = 0
        self._eos, self._packer = tokenizer.eos, packer
        self._cursor: Cursor | None = None
        self._clock, self._pause, self._stop_asked, self._on_alive = clock, pause, stop_asked, on_alive
        self._on_wrapped, self._on_row = on_wrapped, on_row
        self._again = again or Repeated()
        self._halt_nonce = ""
        self._skipped = 0
        self._rollbacks = Rollbacks(cfg.train.nonfinite == "rollback")
        self._saved = (-1, "", "")  # step, SHA-256 of the manifest, of the tensors
        self._val: list[Tensor] = []
        dtype = torch.bfloat16 if narrow else torch.float32
        paths = route_of(cfg.model, cfg.train.seq_len, group.device, dtype)
        self._route = {f"attn_{branch}": path for branch, path in paths.items()}

    @property
    def root(self) -> Path:
        """Where checkpoints are."""
        return self.writer.directory / files.CHECKPOINTS

    @property
    def _rows(self) -> int:
        return self.cfg.train.batch_size // self.group.replicas

    def resume_from(self, manifest: CheckpointManifest) -> None:
        """Continue a verified checkpoint instead of starting fresh."""
        self.steps_done, self._cursor = lm_state.restore(manifest, self.group, self.model, self.optimizer)
        self.telemetry.go_on(self.steps_done)

    def run(self) -> LoopOutcome:
        """Train to the end or to a halt. Raises NotFiniteError (all ranks together) and what the data source raises.

        Nothing that is not a number is ever applied to the weights or saved.
        """
        self._wrapped = wrap(self.model, self.group, self.cfg.ddp)
        self._on_wrapped(self._wrapped)
        self._rehearse()
        if 0 < self.cfg.train.eval_every <= self.cfg.train.steps:  # found out now, and not after hours
            self._packer(True, None).batch(1)
        data = self._data()
        try:
            while True:
                try:
                    return self._to_the_end(data)
                except NotFiniteError as error:
                    self._roll_back(error)
                    data.stop()
                    data = self._data()
        finally:
            data.stop()
            self.telemetry.finish(self._facts())

    def _data(self) -> Prefetcher:
        pinned = self.group.device.type == "cuda"
        return Prefetcher(self._packer(False, self._cursor), self._rows, self.cfg.data.queue, pinned=pinned)

    def _to_the_end(self, data: Prefetcher) -> LoopOutcome:
        loss, cursor = math.nan, (self._cursor or Cursor()).to_json()
        self.telemetry.restart()
        while self.steps_done < self.cfg.train.steps:
            total, batch = self._step(data)
            cursor = batch.cursor
            norm = self._norm()
            loss, size = torch.stack([total, norm]).tolist()  # both at once: the step waits for its device here alone
            applied, halt = self._decide(loss, size)
            self._finish_step(loss, norm, size, data, applied=applied)
            if halt is not None and self._hold_or_halt(halt):
                return self._leave("halted", cursor, loss)
            if self._due(self.cfg.train.save_every) or self.steps_done == self._again.checkpoint:
                self._save(cursor)
                self.telemetry.restart()
            if self._again.over(self.steps_done):
                self._again.tell(self.writer)
        return self._leave("done", cursor, loss)

    def _roll_back(self, error: NotFiniteError) -> None:
        """Weights, moments, random numbers, data and tables as they were at the last checkpoint, on all ranks.

        Raises the error where the run does not go back: see ``Rollbacks``.
        """
        left = self.steps_done
        manifest = self._rollbacks.target(error, left, self.root, self.group, self.writer.run)
        self._again = self._again.and_after(manifest.step, self.writer.directory)
        self.writer.rewind(manifest.step)
        self.resume_from(manifest)
        self._skipped = 0
        fields = {"step": manifest.step, "left": left, "times": self._rollbacks.times, "error": error.what}
        self.writer.event(files.ROLLED_BACK, level="warn", checkpoint=manifest.sha256, **fields)
        self.writer.heartbeat(self.steps_done, "train", "rolled back")
        self._on_alive(False)

    def _rehearse(self) -> None:
        """Two backward passes that leave nothing: DDP learns its graph and settles its buckets in them.

        So every step that counts reduces alike, the first after a resume too, and a resumed training ends in the bits
        of one that was never interrupted.
        """
        if not isinstance(self._wrapped, DistributedDataParallel):
            return
        token = (self._eos + 1) % self.cfg.model.vocab
        shape = (self._rows, self.cfg.train.seq_len + 1)
        tokens = torch.full(shape, token, dtype=torch.int64, device=self.group.device)
        rng = torch.get_rng_state()
        with self.group.trace.of("rehearsal"):
            for _ in range(2):
                self._cross_entropy(self._wrapped, tokens).backward()  # type: ignore[no-untyped-call]
                self.optimizer.zero_grad()
        torch.set_rng_state(rng)
        self._on_alive(False)

    def _step(self, data: Prefetcher) -> tuple[Tensor, Batch]:
        """Forward and backward of every micro-batch; gradients are left in place.

        Returns (mean loss, a scalar that is still on the device; last batch).
        """
        t, nvtx = self.cfg.train, self.cfg.runtime.nvtx
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(t, self.steps_done)
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.group.device)
        window = self.telemetry.window
        window.waited_s = 0.0
        for micro in range(t.accumulate):
            asked = self._clock()
            with marked("fetch", nvtx):
                batch = data.get()
            window.waited_s += self._clock() - asked
            window.fetch.append(batch.fetch_s)
            window.tokens += batch.tokens[:, 1:].numel() * self.group.replicas
            with without_sync(self._wrapped, micro < t.accumulate - 1):
                with marked("forward", nvtx):
                    loss = self._loss(batch.tokens.to(self.group.device, non_blocking=True)) / t.accumulate
                with self.group.trace.of("backward"), marked("backward", nvtx):
                    loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total, batch

    def _loss(self, tokens: Tensor) -> Tensor:
        """Mean next-token cross-entropy; no prediction crosses into another document's first token's past."""
        watch = self._due(self.cfg.train.log_every, ahead=1)
        gates: list[Tensor] | None = [] if watch else None
        with self._met():
            loss = self._cross_entropy(self._wrapped, tokens, gates=gates)
        if gates:
            self.telemetry.gates_of([whole(g) for g in gates])
        return loss

    def _met(self) -> AbstractContextManager[None]:
        """A forward pass in which ranks meet is told of like any collective."""
        return self.group.trace.of("forward") if self.group.context > 1 else nullcontext()

    def _cross_entropy(self, forward: Callable[..., Tensor], tokens: Tensor, **options: Any) -> Tensor:
        inputs, labels = inputs_and_labels(tokens)
        narrow = self.cfg.runtime.narrow
        starts = doc_starts(doc_ids(inputs, self._eos))
        with torch.autocast(self.group.device.type, dtype=torch.bfloat16, enabled=narrow):
            return forward(inputs, starts, labels=labels, chunk=self.cfg.train.loss_chunk, **options)

    def _norm(self) -> Tensor:
        """Of all gradients, before any is clipped, which would spread what is not a number to every tensor."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return whole(gradient_norm.total_norm(gradients))

    def _decide(self, loss: float, norm: float) -> tuple[bool, HaltRequest | None]:
        """One collective a step: is any rank's loss or gradient not a number, does anybody ask for a hold or halt?
        Returns whether the gradient is to be applied, and the request.

        A gradient is the same on all ranks unless one of them has a fault: they must not apply it there alone.
        """
        began = self._clock()
        mine = self.writer.poll_halt()
        vote = 2 if self._stop_asked() else mine.vote if mine else 0
        self.telemetry.window.own_s += self._clock() - began
        mine_is = [int(not math.isfinite(value)) for value in (loss, norm)]
        broken, spoilt, decision = self.group.largest([*mine_is, vote])
        if broken:
            raise NotFiniteError(
                f"the loss is not finite at step {self.steps_done + 1}",
                _FINITE_HINT,
            )
        if spoilt:
            self._skip()
        else:
            self._skipped = 0
        if decision == 0:
            return not spoilt, None
        known = [
            HaltRequest(*r)
            for r in self.group.gather((mine.mode, mine.nonce, mine.run, mine.deadline) if mine else ("halt",))
        ]
        return not spoilt, next((r for r in known if r.vote == decision), HaltRequest("halt"))

    def _finish_step(self, loss: float, norm: Tensor, size: float, data: Prefetcher, *, applied: bool) -> None:
        if applied:
            with marked("optimizer", self.cfg.runtime.nvtx):
                gradient_norm.clip(list(self.model.parameters()), self.cfg.train.grad_clip, norm)
                self.optimizer.step()
        self.steps_done += 1
        self._on_alive(True)
        extra: dict[str, object] = {}
        due = self._due(self.cfg.train.log_every)
        mean = self.group.total([loss])[0] / self.group.world if due else 0.0
        began = self._clock()
        if due:
            lr = lr_at(self.cfg.train, self.steps_done - 1)
            extra = self.telemetry.log(self.steps_done, mean, lr, size, data.depth)
            extra |= self._route
            self._again.row(self.steps_done, mean)
            self._on_row(self.steps_done, {"loss": mean, "lr": lr, "toks_per_s": self.telemetry.rate})
        self.writer.heartbeat(
            self.steps_done, "train", "progress", last_collective=self.group.trace.last, loss=loss, **extra
        )
        self.telemetry.window.own_s += self._clock() - began
        if self._due(self.cfg.train.eval_every):
            self.evaluate()
            self.telemetry.restart()

    def _skip(self) -> None:
        """Say that this step's gradient is not applied, on any rank.

        Raises NotFiniteError naming the first tensor that is not finite, unless ``train.nonfinite`` is ``skip``.
        """
        name = next(
            (n for n, p in self.model.named_parameters() if p.grad is not None and not part(p.grad).isfinite().all()),
            "another rank's part",
        )
        what = f"the gradient of {name} is not finite at step {self.steps_done + 1} on rank {self.group.rank}"
        self._skipped += 1
        if self.cfg.train.nonfinite != "skip" or self._skipped > MOST_SKIPPED:
            told = f"{what}, the {self._skipped}th step in a row" if self._skipped > 1 else what
            raise NotFiniteError(told, f"{_FINITE_HINT}, or train.nonfinite: skip")
        self.writer.event("step_skipped", level="warn", step=self.steps_done + 1, tensor=name)

    def _check_tensors(self) -> None:
        """Raises NotFiniteError on all ranks together where a weight or a moment of any rank is not finite."""
        for rank, name in enumerate(self.group.gather(lm_state.not_finite(self.model, self.optimizer))):
            if name:
                what = f"{name} of rank {rank} is not finite at step {self.steps_done}; nothing was saved"
                raise NotFiniteError(what, _FINITE_HINT)

    def _hold_or_halt(self, asked: HaltRequest) -> bool:
        """Stay held until released (False) or told to halt (True). All ranks decide together, every 50 ms."""
        if asked.vote < 2:
            self.writer.event("held", nonce=asked.nonce, step=self.steps_done)
        while asked.vote == 1:
            self.writer.heartbeat(self.steps_done, "hold", "held", halt_nonce=asked.nonce)
            self._on_alive(False)
            self._pause(HOLD_POLL_S)
            mine = self.writer.poll_halt()
            vote = 2 if self._stop_asked() else mine.vote if mine else 0
            decision = self.group.largest([vote])[0]
            if decision == 0:
                self.writer.event("released", nonce=asked.nonce)
                self.writer.heartbeat(self.steps_done, "train", "released")
                self.telemetry.restart()
                return False
            if decision == 2:
                asked = HaltRequest("halt", asked.nonce, asked.run)
        self._halt_nonce = asked.nonce
        return True

    def _save(self, cursor: dict[str, object]) -> tuple[str, str]:
        """Write this step's checkpoint, unless it was just written; (its manifest's SHA-256, that of its tensors)."""
        if self._saved[0] == self.steps_done:
            return self._saved[1:]
        self._check_tensors()
        manifest, tensors = lm_state.save(
            self.root,
            self.group,
            self.model,
            self.optimizer,
            run=self.writer.run,
            step=self.steps_done,
            cursor=cursor,
            keep=self.cfg.train.keep,
        )
        self._on_alive(False)
        self.writer.event("checkpoint_written", step=self.steps_done, sha256=manifest)
        self._saved = self.steps_done, manifest, tensors
        self._again.saved(self.steps_done, tensors)
        return manifest, tensors

    def _leave(self, status: str, cursor: dict[str, object], loss: float) -> LoopOutcome:
        manifest, tensors = self._save(cursor)
        self._again.tell(self.writer)
        loss = self.group.total([loss])[0] / self.group.world  # as in the tables, not this rank's alone
        if status == "halted":
            self.writer.event("halted", nonce=self._halt_nonce, step=self.steps_done, checkpoint=manifest)
            last = {**self.telemetry.last, "halt_nonce": self._halt_nonce}
            self.writer.heartbeat(self.steps_done, "halted", "halted", **last)
        else:
            self.writer.heartbeat(self.steps_done, "done", "done", **self.telemetry.last)
        return LoopOutcome(status, self.steps_done, manifest, tensors, loss)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the same held-out batches every time, over all ranks."""
        if not self._val:
            held = self._packer(True, None)
            self._val = [held.batch(self._rows).tokens for _ in range(self.cfg.train.eval_batches)]
        self.model.eval()
        with self._met():
            losses = [float(self._cross_entropy(self.model, t.to(self.group.device))) for t in self._val]
        part_again(self.model)
        self.model.train()
        self._on_alive(False)
        mean = self.group.total([sum(losses)])[0] / (len(losses) * self.group.world)
        self.telemetry.val(self.steps_done, mean)
        return mean

    def _facts(self) -> dict[str, Any]:
        t = self.cfg.train
        return {
            "run": self.writer.run,
            "device": str(self.group.device),
            "dtype": self.cfg.runtime.precision,
            "world": self.group.world,
            "steps": self.steps_done,
            "seq_len": t.seq_len,
            "batch_global": t.batch_size * t.accumulate,
            "lr": t.lr,
        }

    def _due(self, every: int, ahead: int = 0) -> bool:
        return every > 0 and (self.steps_done + ahead) % every == 0
