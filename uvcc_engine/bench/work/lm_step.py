"""One optimizer step of the language model as something to be timed: the trainer's arithmetic without its telling."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.train import config as lm_config
from uvcc_engine.train import fp8_products
from uvcc_engine.train.config import LMConfig
from uvcc_engine.train.lm_optimizers import make_optimizers


class Step:
    """A model on ``device`` with an optimizer and one batch of random tokens, one document a row.

    ``packed`` passes the documents' starts as the trainer does, else the row is one document by construction.
    """

    def __init__(self, cfg: LMConfig, device: torch.device, *, packed: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        t = cfg.train
        self._cfg, self._device = cfg, device
        self._model = LanguageModel(cfg.model).to(device)
        self._model.recompute = cfg.runtime.recomputed(cfg.model.n_layers)
        fp8_products.check_device(cfg.runtime.precision, device)
        if cfg.runtime.precision == "fp8":
            fp8_products.use_in(self._model)
        if cfg.runtime.compile:
            self._model.compile_blocks()
        self._optimizer = make_optimizers(self._model, t)
        self._tokens = torch.randint(1, cfg.model.vocab, (t.batch_size, t.seq_len + 1), device=device)
        self._starts = torch.zeros_like(self._tokens[:, 1:]) if packed else None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        t = self._cfg.train
        return t.batch_size * t.seq_len * t.accumulate

    def seconds(self) -> float:
        """Time of one step: forward and backward of each micro-batch, clipping, the optimizer."""
        self._wait()
        began = time.perf_counter()
        self._optimizer.zero_grad()
        narrow = self._cfg.runtime.narrow
        for _ in range(self._cfg.train.accumulate):
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=narrow):
                inputs, labels = self._tokens[:, :-1], self._tokens[:, 1:]
                loss = self._model(inputs, self._starts, labels=labels, chunk=self._cfg.train.loss_chunk)
            (loss / self._cfg.train.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._cfg.train.grad_clip)
        self._optimizer.step()
        self._wait()
        return time.perf_counter() - began

    def rate(self, steps: int) -> float:
        """Tokens per second over ``steps`` steps."""
        return steps * self.tokens / sum(self.seconds() for _ in range(steps))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def shape(name: str, **train: object) -> LMConfig:
    """A packaged config in fp32 on its own device, with other numbers in its ``train`` section."""
    raw = lm_config.load(name)
    raw["data"] = {**raw["data"], "source": "synthetic"}
    raw["train"] = {**raw["train"], **train}
    return lm_config.from_mapping(raw)


def dense(cfg: LMConfig) -> LMConfig:
    """The same model with one full causal branch on torch's SDPA."""
    return replace(cfg, model=replace(cfg.model, attention="dense"))
