"""How many threads a party computes on, and how work is spread over them.

What is spread are compiled loops over words, which let go of the interpreter: their results are the same words however
many threads there are. torch itself keeps to one thread in a worker: sums of floating-point numbers in another order
would differ between parties whose pods do, and its threads, which wait by turning, take a step three times as long
where somebody else needs a processor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

THREADS_FROM: Final = 1 << 20  # operations on words from which more than one thread helps
_told = 0


def use(count: int) -> None:
    """From now on this process computes on so many threads; 0: on as many as torch takes."""
    global _told  # a process is one worker, and has one answer
    _told = count


def allowed() -> int:
    """How many threads this process computes on: what it was told, else as many as torch takes."""
    return _told or torch.get_num_threads()


@lru_cache(maxsize=1)
def _pool(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="kernels")


def over_threads(work: int, size: int, one: Callable[[int, int], None], grain: int = 1) -> None:
    """``one(start, stop)`` over ``size`` rows, on as many threads as there may be if there is ``work`` for them.

    ``grain``: every start is a multiple of it. ``one`` must write what no other part of it writes.
    """
    spread(work, size, lambda _, start, stop: one(start, stop), grain)


def spread(work: int, size: int, one: Callable[[int, int, int], None], grain: int = 1) -> None:
    """The same with the part's number, from 0 on: ``one(number, start, stop)``. The caller's thread takes part 0."""
    count = parts(work, size, grain)
    if count < 2:
        one(0, 0, size)
        return
    each = -(-size // (count * grain)) * grain
    pool = _pool(os.getpid())  # threads do not outlive a fork
    inferring = torch.is_inference_mode_enabled()  # a thread begins without, and may then not write what was made in it

    def as_here(number: int, start: int, stop: int) -> None:
        with torch.inference_mode(inferring):
            one(number, start, stop)

    others = [pool.submit(as_here, at // each, at, min(at + each, size)) for at in range(each, size, each)]
    try:
        one(0, 0, min(each, size))
    finally:  # nobody writes to what the caller may let go of
        for other in others:
            other.result()


def parts(work: int, size: int, grain: int = 1) -> int:
    """How many parts ``spread`` makes at most."""
    return min(allowed(), -(-size // grain)) if work >= THREADS_FROM else 1


def laid_out(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The numbers of ``x``, in order and without gaps, or in ``out`` of its shape: rows are copied over threads."""
    if out is None:
        if x.is_contiguous():
            return x
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.device.type != "cpu" or x.dim() == 0:
        return out.copy_(x)
    found = out

    def rows(start: int, stop: int) -> None:
        found[start:stop] = x[start:stop]

    over_threads(x.numel(), x.shape[0], rows)
    return out


def summed(
    work: int,
    size: int,
    out: Tensor,
    one: Callable[[int, int, Tensor], None],
    grain: int = 1,
    add: Callable[[Tensor, Tensor], Tensor] = torch.add,
) -> Tensor:
    """What ``one(start, stop, found)`` adds to ``found`` over ``size`` rows, where it takes any of them: ``out``, which
    is zero before, and as many like it as there are other threads, added up."""
    found = [out, *(torch.zeros_like(out) for _ in range(parts(work, size, grain) - 1))]
    spread(work, size, lambda number, start, stop: one(start, stop, found[number]), grain)
    for other in found[1:]:
        out = add(out, other)
    return out
