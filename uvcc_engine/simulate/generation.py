"""Text from a private language model: letter by letter, keys and values of earlier lines kept as shares.

The likeliest letter is found under sharing and fed back as a secret one-hot row, so that no party sees what is written;
whoever asked opens all of it at the end. One pass of one line a letter, as far as the model's places reach.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Floats, one_hot
from uvcc_engine.model import layers as nn
from uvcc_engine.model import ops
from uvcc_engine.model.definition.specs import ModelSpec, find_model
from uvcc_engine.mpc.comparisons.maximum import argmax_one_hot_protocol
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct
from uvcc_engine.mpc.kernels.choose import device_for
from uvcc_engine.mpc.products.arithmetic import public, scale_int


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The letters ``tokens`` behind the prompt, opened. ``rounds`` and ``bytes_sent`` (of one party) of a letter."""

    tokens: tuple[int, ...]
    rounds: float
    bytes_sent: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Letters of prompt and answer a second, on the processors of this machine, without a network."""
        return 1.0 / self.seconds if self.seconds else 0.0


def generate_protocol(rt: Runtime, layers: Sequence[nn.Layer], prompt: Share, letters: int) -> MpcProtocol[list[Share]]:
    """So many ``letters`` behind the prompt (places, vocabulary), as one-hot rows (1, vocabulary); nothing is opened.

    Rounds of a letter: those of each layer, and 6 and more for the largest of its scores.
    """
    found: list[Share] = []
    for place in range(prompt.shape[0] + letters - 1):
        known = place < prompt.shape[0]
        x = prompt.index(slice(place, place + 1)) if known else found[-1]
        scores = yield from nn.next_protocol(rt, layers, x, place)
        if place >= prompt.shape[0] - 1:
            bits = yield from argmax_one_hot_protocol(rt, scores)
            found.append(scale_int(bits, 1 << prompt.f).with_f(prompt.f))
    return found


def generate(
    job: PrivateJob,
    weights: Sequence[Floats],
    prompt: Sequence[int],
    letters: int,
    *,
    model: ModelSpec | None = None,
    on: str = "cpu",
) -> GeneratedText:
    """Continue a prompt by the likeliest letters, between three simulated parties. ``model``: the job's, where it
    computes with a public base. ``on``: where the parties compute, ``cpu`` or ``cuda``.

    Raises ConfigError for a model that is no causal language model, or whose places do not reach so far.
    """
    model = find_model(job.model) if model is None else model
    check_prompt(model, prompt, letters)
    rows = one_hot(np.array(prompt, dtype=np.int64)[:, None], model.classes)
    device, prg = device_for(on), job.random_generator
    planes = LocalPlanes(job.seed, few_rounds=job.rounds == "few", device=device, prg=prg)

    def body(rt: Runtime) -> tuple[list[Share], int, int]:
        ops.load()
        shares = [public(rt, torch.from_numpy(w), f=job.frac_bits) for w in weights]
        layers = nn.build(model, shares)
        rt.begin_epoch(0)
        asked = public(rt, torch.from_numpy(rows), f=job.frac_bits)
        return rt.run(generate_protocol(rt, layers, asked, letters)), rt.rounds, rt.bytes_sent

    began = time.monotonic()
    found = planes.run_three(body)
    steps = len(prompt) + letters - 1
    seconds = (time.monotonic() - began) / steps
    opened = [reconstruct([one[0][k] for one in found]) for k in range(letters)]
    tokens = tuple(int(one.argmax()) for one in opened)
    return GeneratedText(tokens, found[0][1] / steps, found[0][2] / steps, seconds)


def check_prompt(model: ModelSpec, prompt: Sequence[int], letters: int) -> None:
    """Refuse (ConfigError) a prompt that the model cannot continue by so many letters."""
    if model.features != model.positions * model.classes or model.positions < 2:
        raise ConfigError(f"{model.name} is no model of the letters that come next", "train one on a text")
    if not prompt or letters < 1 or len(prompt) + letters > model.positions + 1:
        raise ConfigError(
            f"a prompt of {len(prompt)} letters and {letters} more, the model has {model.positions} places",
            "ask for fewer, or shorten the prompt",
        )
    if min(prompt) < 0 or max(prompt) >= model.classes:
        raise ConfigError("the prompt has letters that the model does not know", "use those of the text it learned")
