"""Numbers that a GPU draws on a second stream beside the program: the CPU's bits, given once, within their memory."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.mpc.comparisons.selection import relu_only_protocol
from uvcc_engine.mpc.foundation.drawn_beside import DrawBeside
from uvcc_engine.mpc.foundation.local import LocalPlanes, rehearsal_keys
from uvcc_engine.mpc.foundation.prg import OWN, ChaChaStream
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, share_of, split
from uvcc_engine.mpc.products.arithmetic import matmul_protocol
from uvcc_engine.worker.compute_setup import draw_ahead_for

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports it
CPU = torch.device("cpu")
LONG = 1_100  # numbers: more than are drawn where they are needed
Program = Sequence[tuple[int, int]]
STEP: Program = ((0, LONG), (1, 2 * LONG), (OWN, LONG + 3), (0, 5), (1, LONG))


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name, self.waited_for = name, list[Any]()

    def wait_event(self, event: Any) -> None:
        self.waited_for.append(event)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the stream")


class FakeCuda:
    """What ``DrawBeside`` uses of ``torch.cuda``: which stream each thread launches on, and who waits for what."""

    def __init__(self) -> None:
        self.main = FakeStream("main")
        self.made: list[FakeStream] = []
        self._here = threading.local()
        fake = self

        class Event:
            def record(self, stream: FakeStream) -> None:
                assert stream is fake.current_stream(CPU)
                self.on = stream

        self.Event = Event

    def Stream(self, device: torch.device) -> FakeStream:
        self.made.append(FakeStream(f"side{len(self.made)}"))
        return self.made[-1]

    def current_stream(self, device: torch.device) -> FakeStream:
        return getattr(self._here, "stream", self.main)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream(CPU)
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before


def alone(ahead: DrawBeside | None, stream: int = 0) -> Runtime:
    """The runtime of party 0, that draws and sends nothing."""
    plane, keys = LocalPlanes().planes[0], rehearsal_keys(0)[0]
    return Runtime(0, plane, keys, b"s" * 32, prg="chacha20", ahead=ahead, stream=stream)


def epoch_of(rt: Runtime, epoch: int, program: Program = STEP) -> list[Tensor]:
    rt.begin_epoch(epoch)
    first, second = rt.draws(), rt.draws()
    return [(first if k < 2 else second).ring(component, count) for k, (component, count) in enumerate(program)]


@pytest.mark.ci(__file__)
def test_the_second_stream_draws_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the GPU's kernel, in the interpreter; whatever is not drawn ahead here is drawn by the CPU."""
    kernels = pytest.importorskip("uvcc_engine.mpc.kernels.triton_ops", exc_type=ImportError)
    fake, on = FakeCuda(), list[str]()
    honest = ChaChaStream.generate

    def generate(self: ChaChaStream, place: tuple[int, int, int], piece: int, out: Tensor, room: Tensor | None) -> None:
        on.append(fake.current_stream(CPU).name)
        if on[-1] == "main":
            honest(self, place, piece, out, room)
        else:
            kernels.chacha20(self._key, piece.to_bytes(2, "big") + struct.pack(">IHI", *place), 0, out)

    monkeypatch.setattr(ChaChaStream, "generate", generate)
    program: Program = ((0, LONG), (OWN, LONG + 3), (0, 5))
    plain, beside = alone(None), alone(DrawBeside(CPU, cuda=fake))
    for epoch in (0, 1, 4, 5):
        for ours, theirs in zip(epoch_of(beside, epoch, program), epoch_of(plain, epoch, program), strict=True):
            assert torch.equal(ours, theirs), epoch
    assert beside.forecast is not None
    # two of the three are long; nothing foretold epoch 0, and 2 was foretold where 4 came
    assert (beside.forecast.met, beside.forecast.missed) == (2 * 2, 2 * 2)
    assert len(fake.made) == 1
    assert on.count("side0") == 4 * 2
    # a program's own stream waits for each kernel whose numbers it takes; the host for none (see FakeStream)
    assert [event.on.name for event in fake.main.waited_for] == ["side0"] * 4
    assert fake.made[0].waited_for == []


def test_a_program_that_changes_draws_for_itself() -> None:
    ahead = DrawBeside(CPU, cuda=FakeCuda())
    plain, beside = alone(None), alone(ahead)
    other: Program = ((0, LONG), (1, LONG), (OWN, LONG), (1, LONG))
    for epoch, program in enumerate((STEP, other, other, STEP, ())):
        for ours, theirs in zip(epoch_of(beside, epoch, program), epoch_of(plain, epoch, program), strict=True):
            assert torch.equal(ours, theirs), epoch
    assert beside.forecast is not None
    assert beside.forecast.met == 2 + 4 + 2  # what both programs have at the same places, and all of the second time
    beside.begin_epoch(9)
    assert ahead.held == 0


def test_no_place_of_a_stream_is_given_twice() -> None:
    rt = alone(DrawBeside(CPU, cuda=FakeCuda()))
    epoch_of(rt, 0)
    rt.begin_epoch(1)
    rt.draws().ring(0, LONG)  # was on its way
    assert rt.forecast is not None
    assert rt.forecast.met == 1
    with pytest.raises(ProtocolError, match="mask reuse refused"):
        rt.streams[0].draw(1, 0, 0, 0, torch.empty(LONG, dtype=torch.int64))


def test_what_lies_ready_stays_within_its_memory() -> None:
    most = 8 * (LONG + 2 * LONG)
    ahead = DrawBeside(CPU, most, cuda=FakeCuda())
    plain, ours, beside = alone(None), alone(ahead), alone(ahead, stream=1)
    for epoch in range(3):
        found = epoch_of(ours, epoch)
        assert 0 < ahead.held <= most
        epoch_of(beside, epoch)
        assert 0 < ahead.held <= most
        for mine, theirs in zip(found, epoch_of(plain, epoch), strict=True):
            assert torch.equal(mine, theirs), epoch
    assert ours.forecast is not None
    assert ours.forecast.met > 0
    ahead.close()
    before = ours.forecast.met
    for epoch in (3, 4):
        for mine, theirs in zip(epoch_of(ours, epoch), epoch_of(plain, epoch), strict=True):
            assert torch.equal(mine, theirs)
    assert ours.forecast.met <= before + 4  # what lay ready, and nothing new
    for rt in (ours, beside):
        rt.begin_epoch(9)
    assert ahead.held == 0


def test_three_parties_come_to_the_same_shares() -> None:
    def trained(aheads: Sequence[DrawBeside | None]) -> tuple[list[list[Share]], list[Runtime]]:
        planes, keys = LocalPlanes(), rehearsal_keys(0)
        planes.runtimes = [
            Runtime(p, planes.planes[p], keys[p], b"s" * 32, prg="chacha20", ahead=aheads[p]) for p in range(3)
        ]
        parts = split(torch.linspace(-3, 3, 3_600), 16, random.Random(4).randbytes)

        def steps(rt: Runtime) -> list[Share]:
            found = [share_of(parts, rt.party)]
            for epoch in range(4):
                rt.begin_epoch(epoch)
                weight = found[-1].reshape(60, 60)
                found.append(rt.run(relu_only_protocol(rt, rt.run(matmul_protocol(rt, weight, weight, scale=0.01)))))
            return found

        return planes.run_three(steps), planes.runtimes

    ours, runtimes = trained([DrawBeside(CPU, cuda=FakeCuda()) for _ in range(3)])
    theirs, _ = trained([None] * 3)
    for a, b in ((a, b) for p in range(3) for a, b in zip(ours[p], theirs[p], strict=True)):
        assert torch.equal(a.first, b.first)
        assert torch.equal(a.second, b.second)
    for rt in runtimes:
        assert rt.forecast is not None
        assert rt.forecast.met == 3 * rt.forecast.missed > 0  # of the first epoch everything, of the others nothing


def test_proofs_on_the_host_draw_nothing_of_the_device_s() -> None:
    rt = alone(DrawBeside(CPU, cuda=FakeCuda()))
    rt.staging = object()  # type: ignore[assignment]  # as of a GPU: what is on the host is apart
    epoch_of(rt, 0)
    rt.begin_epoch(1)
    with rt.on_host():
        rt.draws().ring(0, LONG)
    assert rt.forecast is not None
    assert rt.forecast.met == 0
    rt.draws().ring(0, LONG)
    assert rt.forecast.met + rt.forecast.missed == 4 + 1  # those of epoch 0, and the one on the device


def test_a_worker_on_a_gpu_has_a_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or FakeStream("side"))
    gpu = torch.device("cuda", 0)
    ahead = draw_ahead_for(Topology(2, 2, 2), gpu)
    assert isinstance(ahead, DrawBeside)
    assert (ahead.device, made) == (gpu, [gpu])
    assert alone(ahead).forecast is None  # of a runtime that computes elsewhere it foretells nothing
