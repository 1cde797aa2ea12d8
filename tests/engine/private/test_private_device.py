"""Where shares are computed: a GPU's code path in Triton's interpreter gives the bits of the CPU's, and the border
between device and messages waits for messages, never for single operations."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from private_kit import opened_digits
from torch.utils._python_dispatch import TorchDispatchMode

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes, rehearsal_keys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.staging import CudaStaging, staging_for
from uvcc_engine.mpc.kernels import choose

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports it
CPU = torch.device("cpu")
JOB = PrivateJob(steps=1, batch=6, test_rows=20)


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    launch, one_at_a_time = InterpretedFunction.run, threading.Lock()

    def locked(self: Any, *args: Any, **more: Any) -> Any:
        # Parties are threads here. The interpreter replaces parts of triton.language while it runs, and parses a
        # kernel's source before its first run, which CPython 3.11 refuses of two threads at once (its issue 106905).
        with one_at_a_time:
            return launch(self, *args, **more)

    monkeypatch.setattr(InterpretedFunction, "run", locked)
    monkeypatch.setenv(choose.KERNELS_ENV, "triton")
    choose.kernels_for.cache_clear()
    yield
    choose.kernels_for.cache_clear()


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        return None


class FakeCuda:
    """What ``CudaStaging`` uses of ``torch.cuda``, on a CPU. Counts what makes the host wait."""

    def __init__(self) -> None:
        self.waits = self.copies = 0
        fake = self

        class Event:
            def record(self, stream: FakeStream) -> None:
                fake.copies += 1

            def synchronize(self) -> None:
                fake.waits += 1

        self.Event = Event

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream()

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream()

    def stream(self, stream: FakeStream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def pinned_empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


class Waiting(TorchDispatchMode):
    """Notes operations whose result the host must see before it can go on; ``CALLS`` never come this way."""

    NAMES = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::masked_select")
    CALLS = ("item", "tolist", "__int__", "__index__")  # what checks public numbers on the host calls others

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in self.NAMES:
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def train(
    prg: str = "aes", fakes: list[FakeCuda] | None = None, watched: tuple[int, Waiting] | None = None
) -> list[Any]:
    """Losses, digests and messages of the three parties. ``watched``: one of them, whose steps' operations are noted.

    No two at once: parties are threads here, and torch can end the process where several of them note operations.
    """
    inputs, planes = opened_digits(JOB), LocalPlanes(3)
    for p in range(3):
        staging = None if fakes is None else CudaStaging(CPU, fakes[p])
        planes.runtimes[p] = Runtime(p, planes.planes[p], rehearsal_keys(3)[p], bytes(32), prg=prg, staging=staging)

    def body(rt: Runtime) -> Any:
        trainer = PrivateTrainer(rt, JOB, find_model(JOB.model), inputs[rt.party])
        losses = []
        for step in range(JOB.steps):
            rt.begin_epoch(step)
            with watched[1] if watched is not None and watched[0] == rt.party else contextlib.nullcontext():
                losses.append(trainer.step(step).loss)
        return losses, [trainer.component_digest(c, b"blind") for c in ("first", "second")], rt.messages

    return planes.run_three(body)


@pytest.mark.ci(__file__)
def test_a_training_on_a_gpu_s_kernels_has_the_bits_of_the_cpu_s(request: pytest.FixtureRequest) -> None:
    plain = train("chacha20")
    request.getfixturevalue("triton_kernels")
    assert type(choose.kernels_for(CPU)).__name__ == "CudaKernels"
    assert train("chacha20") == plain
    assert plain[0][0][0] is not None


def test_only_messages_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, called = train(), list[str]()
    for name in Waiting.CALLS:
        honest = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any, _name: str = name, _honest: Any = honest) -> Any:
            called.append(_name)
            return _honest(self, *args)

        monkeypatch.setattr(torch.Tensor, name, noted)
    for party in range(3):
        fakes, waiting = [FakeCuda() for _ in range(3)], Waiting()
        assert train(fakes=fakes, watched=(party, waiting)) == plain
        for fake, (_, _, messages) in zip(fakes, plain, strict=True):
            assert fake.copies > messages  # parts share messages, and so their wait
            assert fake.waits <= messages
        # the one opened number of a step: digests of what both holders sent, their comparison, and the number itself
        assert waiting.seen == ["aten::equal"] * JOB.steps
    assert called == ["item"] * 3 * 3 * JOB.steps


def test_an_interpreter_that_was_not_asked_for_is_refused(
    triton_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="UVCC_KERNELS=triton on a CPU"):
        choose.kernels_for(CPU)


def test_the_device_is_what_the_job_asks_for_and_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose.device_for("auto") == choose.device_for("cpu") == CPU
    with pytest.raises(ConfigError, match="reaches no GPU here"):
        choose.device_for("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose.device_for("auto") == CPU
    with pytest.raises(ConfigError, match="Triton, which the kernels need"):
        choose.device_for("cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert choose.device_for("auto") == choose.device_for("cuda") == torch.device("cuda", 0)
    assert choose.device_for("cpu") == CPU
    assert staging_for(CPU) is staging_for(CPU)


def test_a_policy_names_the_device_only_where_it_is_not_left_to_the_pods() -> None:
    assert "device" not in PrivateJob().to_json()
    cuda = PrivateJob(device="cuda")
    assert PrivateJob.from_json(cuda.to_json()) == cuda
    assert (cuda.random_generator, PrivateJob().random_generator) == ("chacha20", "aes")
    with pytest.raises(ConfigError, match=r"job\.device"):
        PrivateJob(device="tpu")  # type: ignore[arg-type]
