"""The training loop of the language model: plain, and every decision taken by all ranks together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from uvcc_engine.contract.checkpoint import Manifest
from uvcc_engine.contract.control import HaltRequest
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.writer import RunWriter
from uvcc_engine.nsa.blocks import doc_starts
from uvcc_engine.nsa.model import GateMetrics, LanguageModel, gate_metrics
from uvcc_engine.train import state
from uvcc_engine.train.config import LMConfig
from uvcc_engine.train.data import Batch, Cursor, Packer, Prefetcher, Tokenizer, doc_ids
from uvcc_engine.train.distributed import Group, without_sync, wrap
from uvcc_engine.train.schedule import lr_at, make_optimizer

HOLD_POLL_S = 0.05


class NotFiniteError(UvccError):
    """The loss stopped being a number; the last good checkpoint is untouched."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the loop ended: done | halted, after ``step`` optimizer steps, with the checkpoint it left."""

    status: str
    step: int
    checkpoint: str
    tensors_sha256: str
    loss: float


@dataclass(slots=True)
class Window:
    """What is averaged between two log lines."""

    began: float
    tokens: int = 0
    fetch: list[float] = field(default_factory=list)


class Trainer:
    """One rank. ``packer(val, cursor)`` makes the data; ``clock`` is monotonic seconds; ``stop_asked`` is SIGTERM."""

    def __init__(
        self,
        cfg: LMConfig,
        group: Group,
        writer: RunWriter,
        tokenizer: Tokenizer,
        packer: Callable[[bool, Cursor | None], Packer],
        *,
        clock: Callable[[], float] = time.perf_counter,
        stop_asked: Callable[[], bool] = lambda: False,
        pause: Callable[[float], None] = time.sleep,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        if cfg.train.batch_size % group.world:
            raise UvccError(
                f"train.batch_size={cfg.train.batch_size} cannot be shared by {group.world} ranks",
                f"make it a multiple of {group.world}",
            )
        torch.manual_seed(cfg.train.seed)
        self.cfg, self.group, self.writer = cfg, group, writer
        self.model = LanguageModel(cfg.model).to(group.device)
        self.model.recompute = cfg.runtime.gradient_checkpointing
        self.optimizer = make_optimizer(self.model, cfg.train, group.device)
        self.steps_done = 0
        self._eos, self._packer = tokenizer.eos, packer
        self._cursor: Cursor | None = None
        self._clock, self._pause, self._stop_asked, self._on_step = clock, pause, stop_asked, on_step
        self._first = True
        self._gates: GateMetrics | None = None
        self._window = Window(clock())
        self._val: list[Tensor] = []

    @property
    def root(self) -> Path:
        """Where checkpoints are."""
        return self.writer.directory / "checkpoints"

    def resume_from(self, manifest: Manifest) -> None:
        """Continue a verified checkpoint instead of starting fresh."""
        self.steps_done, self._cursor = state.restore(manifest, self.group, self.model, self.optimizer)

    def run(self) -> Outcome:
        """Train to the end or to a halt. Raises NotFiniteError (all ranks together) and what the data source raises."""
        rows = self.cfg.train.batch_size // self.group.world
        wrapped = wrap(self.model, self.group, self.cfg.ddp)
        self._forward = torch.compile(wrapped) if self.cfg.runtime.compile else wrapped
        self._wrapped = wrapped
        data = Prefetcher(self._packer(False, self._cursor), rows, self.cfg.data.queue)
        loss, cursor = math.nan, (self._cursor or Cursor()).to_json()
        try:
            self._window = Window(self._clock())
            while self.steps_done < self.cfg.train.steps:
                loss, batch = self._step(data)
                cursor = batch.cursor
                halt = self._decide(loss)
                self._finish_step(loss, data)
                if halt is not None and self._hold_or_halt(halt):
                    return self._leave("halted", cursor, loss)
                if self._due(self.cfg.train.save_every):
                    self._save(cursor)
            return self._leave("done", cursor, loss)
        finally:
            data.stop()

    def _step(self, data: Prefetcher) -> tuple[float, Batch]:
        """Forward and backward of every micro-batch; gradients are left in place. Returns (mean loss, last batch)."""
        t = self.cfg.train
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(t, self.steps_done)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.group.device)
        for micro in range(t.accumulate):
            batch = data.get()
            self._window.fetch.append(batch.fetch_s)
            self._window.tokens += batch.tokens[:, 1:].numel() * self.group.world
            with without_sync(self._wrapped, micro < t.accumulate - 1 and not self._first):
                loss = self._loss(batch.tokens.to(self.group.device)) / t.accumulate
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            self._first = False
        return float(total), batch

    def _loss(self, tokens: Tensor) -> Tensor:
        """Mean next-token cross-entropy; no prediction crosses into another document's first token's past."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        watch = self._due(self.cfg.train.log_every, ahead=1)
        gates: list[Tensor] | None = [] if watch else None
        bf16 = self.cfg.runtime.precision == "bf16"
        with torch.autocast(self.group.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = self._forward(inputs, doc_starts(doc_ids(inputs, self._eos)), gates=gates)
        if gates:
            self._gates = gate_metrics(gates)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def _decide(self, loss: float) -> HaltRequest | None:
        """One collective a step: is any loss not a number, does anybody ask for a hold or halt?"""
        mine = self.writer.poll_halt()
        vote = 2 if self._stop_asked() else mine.vote if mine else 0
        broken, decision = self.group.largest([int(not math.isfinite(loss)), vote])
        if broken:
            raise NotFiniteError(
                f"the loss is not finite at step {self.steps_done + 1}",
                "resume from the last checkpoint with a lower lr or runtime.precision: fp32",
            )
        if decision == 0:
            return None
        known = [
            HaltRequest(*r)
            for r in self.group.gather((mine.mode, mine.nonce, mine.run, mine.deadline) if mine else ("halt",))
        ]
        return next((r for r in known if r.vote == decision), HaltRequest("halt"))

    def _finish_step(self, loss: float, data: Prefetcher) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.train.grad_clip)
        self.optimizer.step()
        self.steps_done += 1
        self._on_step()
        extra: dict[str, object] = {}
        if self._due(self.cfg.train.log_every):
            extra = self._log(loss, float(norm), data)
        self.writer.heartbeat(self.steps_done, "train", "progress", **extra)
        if self._due(self.cfg.train.eval_every):
            self.evaluate()

    def _log(self, loss: float, norm: float, data: Prefetcher) -> dict[str, object]:
        now = self._clock()
        rate = self._window.tokens / max(1e-9, now - self._window.began)
        mean = self.group.total([loss])[0] / self.group.world
        self.writer.metrics(self.steps_done, mean, lr_at(self.cfg.train, self.steps_done - 1), rate)
        fetch = sorted(self._window.fetch)
        extra: dict[str, object] = {
            "grad_norm": norm,
            "dt_fetch_s": fetch[-1],
            "fetch_p50_ms": 1e3 * fetch[len(fetch) // 2],
            "fetch_p95_ms": 1e3 * fetch[int(len(fetch) * 0.95)],
            "queue_depth": data.depth,
        }
        if self._gates:
            g = self._gates
            extra |= {"gate_entropy_mean": g.entropy_mean, "gate_entropy_min": g.entropy_min}
            extra |= {"gate_max_gate": g.max_gate, "gate_collapse_frac": g.collapse_frac}
            extra["gate_branch_shares"] = list(g.branch_shares)
        self._window = Window(now)
        return extra

    def _hold_or_halt(self, asked: HaltRequest) -> bool:
        """Stay held until released (False) or told to halt (True). All ranks decide together, every 50 ms."""
        if asked.vote < 2:
            self.writer.event("held", nonce=asked.nonce, step=self.steps_done)
        while asked.vote == 1:
            self.writer.heartbeat(self.steps_done, "hold", "held", halt_nonce=asked.nonce)
            self._pause(HOLD_POLL_S)
            mine = self.writer.poll_halt()
            vote = 2 if self._stop_asked() else mine.vote if mine else 0
            decision = self.group.largest([vote])[0]
            if decision == 0:
                self.writer.event("released", nonce=asked.nonce)
                self.writer.heartbeat(self.steps_done, "train", "released")
                self._window = Window(self._clock())
                return False
            if decision == 2:
                asked = HaltRequest("halt", asked.nonce, asked.run)
        self._halt_nonce = asked.nonce
        return True

    def _save(self, cursor: dict[str, object]) -> tuple[str, str]:
        manifest, tensors = state.save(
            self.root,
            self.group,
            self.model,
            self.optimizer,
            run=self.writer.run,
            step=self.steps_done,
            cursor=cursor,
            keep=self.cfg.train.keep,
        )
        self.writer.event("checkpoint_written", step=self.steps_done, sha256=manifest)
        return manifest, tensors

    def _leave(self, status: str, cursor: dict[str, object], loss: float) -> Outcome:
        manifest, tensors = self._save(cursor)
        if status == "halted":
            self.writer.event("halted", nonce=self._halt_nonce, step=self.steps_done, checkpoint=manifest)
            self.writer.heartbeat(self.steps_done, "halted", "halted", halt_nonce=self._halt_nonce)
        else:
            self.writer.heartbeat(self.steps_done, "done", "done")
        return Outcome(status, self.steps_done, manifest, tensors, loss)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the same held-out batches every time, over all ranks."""
        rows = self.cfg.train.batch_size // self.group.world
        if not self._val:
            held = self._packer(True, None)
            self._val = [held.batch(rows).tokens for _ in range(self.cfg.train.eval_batches)]
        self.model.eval()
        losses = [float(self._eval_loss(t.to(self.group.device))) for t in self._val]
        self.model.train()
        mean = self.group.total([sum(losses)])[0] / (len(losses) * self.group.world)
        self.writer.val(self.steps_done, mean, math.exp(min(mean, 50.0)))
        return mean

    def _eval_loss(self, tokens: Tensor) -> Tensor:
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        bf16 = self.cfg.runtime.precision == "bf16"
        with torch.autocast(self.group.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = self.model(inputs, doc_starts(doc_ids(inputs, self._eos)))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def _due(self, every: int, ahead: int = 0) -> bool:
        return every > 0 and (self.steps_done + ahead) % every == 0
