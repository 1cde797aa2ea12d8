"""One party computes the same to the bit on any number of threads, and the benchmark sees it where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from uvcc_engine.bench import threads as bench
from uvcc_engine.bench.epochs import CASES
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.mpc.kernels import threads
from uvcc_engine.mpc.kernels.cpu import CpuKernels


@pytest.fixture(autouse=True)
def _many_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little work is spread, too, and afterwards this process computes as before."""
    monkeypatch.setattr(threads, "THREADS_FROM", 1)
    yield
    threads.use(0)


SMALL = replace(CASES["logistic"], batch=32)


@pytest.mark.parametrize("more", [{}, {"verify": "proofs"}])
def test_a_party_by_itself_sends_what_it_sent_among_three(more: dict[str, str]) -> None:
    one = bench.recorded(SMALL, 2, **more)
    single, double = bench.thread_rows("logistic", one, [1, 3], 2)
    assert (single.name, single.runs, single.reference) == ("logistic_threads_1", 2, None)
    assert (double.name, double.runs, double.reference) == ("logistic_threads_3", 2, single.value)
    assert min(single.min, double.min) > 0


def test_a_thread_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted defect: what is left to the other threads of one kernel is lost."""
    one = bench.recorded(SMALL, 2, verify="proofs")
    honest = CpuKernels.weigh_columns

    def first_part(self: CpuKernels, x: torch.Tensor, weights: torch.Tensor, degree: int) -> torch.Tensor:
        found = honest(self, x, weights, degree)
        found[len(found) // 2 :] = 0
        return found

    monkeypatch.setattr(CpuKernels, "weigh_columns", first_part)
    with pytest.raises(UvccError, match="differ"):
        one.again(2)


def test_threads_are_counted_in_doubles_up_to_the_most() -> None:
    assert [bench.counts_up_to(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    for wrong in (["--case", "vgg"], ["--most", "0"], ["--steps", "1"], ["--runs", "0"]):
        with pytest.raises(ConfigError):
            bench.main(wrong)
