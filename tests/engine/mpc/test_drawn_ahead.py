"""Numbers that are drawn before a program comes to them: the same bits, given once, within their memory."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.mpc.comparisons.selection import relu_only_protocol
from uvcc_engine.mpc.foundation.drawn_ahead import DrawAhead
from uvcc_engine.mpc.foundation.local import LocalPlanes, rehearsal_keys
from uvcc_engine.mpc.foundation.prg import OWN
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, share_of, split
from uvcc_engine.mpc.products.arithmetic import matmul_protocol

LONG = 3_000  # numbers: more than are drawn where they are needed
Program = Sequence[tuple[int, int]]
STEP: Program = ((0, LONG), (1, 2 * LONG), (OWN, 40_000), (0, 5), (1, LONG))


@pytest.fixture
def ahead() -> Iterator[DrawAhead]:
    made = DrawAhead()
    yield made
    made.close()


def alone(ahead: DrawAhead | None, prg: str = "aes", stream: int = 0) -> Runtime:
    """The runtime of party 0, that draws and sends nothing."""
    planes = LocalPlanes()
    sid = b"s" * 32
    return Runtime(0, planes.planes[0], rehearsal_keys(0)[0], sid, prg=prg, ahead=ahead, stream=stream)


def epoch_of(rt: Runtime, epoch: int, program: Program = STEP) -> list[Tensor]:
    rt.begin_epoch(epoch)
    first, second = rt.draws(), rt.draws()
    return [(first if k < 2 else second).ring(component, count) for k, (component, count) in enumerate(program)]


@pytest.mark.parametrize("prg", ["aes", "chacha20"])
def test_foretold_numbers_are_those_that_would_have_been_drawn(prg: str, ahead: DrawAhead) -> None:
    plain, foretold = alone(None, prg), alone(ahead, prg)
    assert plain.forecast is None
    assert foretold.forecast is not None
    for epoch in (0, 1, 2, 3, 7, 8):
        for ours, theirs in zip(epoch_of(foretold, epoch), epoch_of(plain, epoch), strict=True):
            assert torch.equal(ours, theirs), epoch
        assert ahead.settle()
    # four of the five are long; nothing foretold epochs 0 and 1, and 4 was foretold where 7 came
    assert (foretold.forecast.met, foretold.forecast.missed) == (3 * 4, 3 * 4)
    with pytest.raises(ProtocolError, match="would repeat masks"):
        foretold.begin_epoch(8)


def test_a_program_that_changes_draws_for_itself(ahead: DrawAhead) -> None:
    plain, foretold = alone(None), alone(ahead)
    other: Program = ((0, LONG), (1, LONG), (OWN, 40_000), (1, LONG))
    for epoch, program in enumerate((STEP, STEP, other, other, STEP, ())):
        for ours, theirs in zip(epoch_of(foretold, epoch, program), epoch_of(plain, epoch, program), strict=True):
            assert torch.equal(ours, theirs), epoch
        assert ahead.settle()
    assert foretold.forecast is not None
    # of epochs 2 to 4: two draws that both programs begin with, none of the other's, the first two again
    assert foretold.forecast.met >= 2 + 2 + 2
    assert foretold.forecast.missed > 8
    for epoch in (6, 7):  # nobody took what was foretold for 6
        foretold.begin_epoch(epoch)
    assert ahead.held == 0


def test_no_place_of_a_stream_is_given_twice(ahead: DrawAhead) -> None:
    rt = alone(ahead)
    epoch_of(rt, 0)
    epoch_of(rt, 1)
    assert ahead.settle()
    rt.begin_epoch(2)
    rt.draws().ring(0, LONG)  # lay ready
    assert rt.forecast is not None
    assert rt.forecast.met == 1
    again = torch.empty(LONG, dtype=torch.int64)
    with pytest.raises(ProtocolError, match="mask reuse refused"):
        rt.streams[0].draw(2, 0, 0, 0, again)


def test_what_lies_ready_stays_within_its_memory() -> None:
    most = 8 * (LONG + 2 * LONG)
    ahead = DrawAhead(most)
    plain, foretold, beside = alone(None), alone(ahead), alone(ahead, stream=1)
    program: Program = (*STEP, *((0, LONG) for _ in range(20)), (1, most))
    for epoch in range(5):
        found = epoch_of(foretold, epoch, program)
        epoch_of(beside, epoch, program)
        assert ahead.settle()
        assert epoch == 0 or 0 < ahead.held <= most
        for ours, theirs in zip(found, epoch_of(plain, epoch, program), strict=True):
            assert torch.equal(ours, theirs), epoch
    assert foretold.forecast is not None
    assert foretold.forecast.met > 0  # what had no room went by, and the rest was drawn behind it
    ahead.close()
    assert [t.name for t in threading.enumerate() if t.name == "draws ahead"] == []
    for ours, theirs in zip(epoch_of(foretold, 5, program), epoch_of(plain, 5, program), strict=True):
        assert torch.equal(ours, theirs)


def test_the_thread_ends_with_its_runtimes() -> None:
    ahead = DrawAhead()
    rt = alone(ahead)
    epoch_of(rt, 0)
    epoch_of(rt, 1)
    (thread,) = (t for t in threading.enumerate() if t.name == "draws ahead")
    seen = weakref.ref(ahead)
    assert thread.is_alive()
    del rt, ahead
    gc.collect()
    thread.join(120.0)
    assert seen() is None
    assert not thread.is_alive()


def test_three_parties_come_to_the_same_shares(ahead: DrawAhead) -> None:
    def trained(ahead: DrawAhead | None) -> tuple[list[list[Share]], list[Runtime]]:
        planes, keys, sid = LocalPlanes(), rehearsal_keys(0), b"s" * 32
        planes.runtimes = [Runtime(p, planes.planes[p], keys[p], sid, ahead=ahead) for p in range(3)]
        x = random.Random(4)
        parts = split(torch.linspace(-3, 3, 80 * 80), 16, x.randbytes)

        def steps(rt: Runtime) -> list[Share]:
            found = [share_of(parts, rt.party)]
            for epoch in range(4):
                rt.begin_epoch(epoch)
                weight = found[-1].reshape(80, 80)
                found.append(rt.run(relu_only_protocol(rt, rt.run(matmul_protocol(rt, weight, weight, scale=0.01)))))
            return found

        return planes.run_three(steps), planes.runtimes

    ours, runtimes = trained(ahead)
    theirs, _ = trained(None)
    for a, b in ((a, b) for p in range(3) for a, b in zip(ours[p], theirs[p], strict=True)):
        assert torch.equal(a.first, b.first)
        assert torch.equal(a.second, b.second)
    assert any(rt.forecast is not None and rt.forecast.met > 0 for rt in runtimes)
