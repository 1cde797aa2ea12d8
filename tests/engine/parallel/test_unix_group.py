"""Collectives over Unix sockets: large tensors both ways at once, messages out of order, members that are gone."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.parallel import by_halves
from uvcc_engine.parallel.group import lost
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.member_connection import MemberConnection
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.parallel.unix_group import UnixGroup

BIG = 1 << 17  # a MiB of int64: several times what a socket holds


def members(count: int, body: Callable[[UnixGroup, int], Any], limit_s: float = 60) -> list[Any]:
    """``body(group, index)`` for every member of one group, each in a thread of its own."""
    store, timeout = dist.HashStore(), timedelta(seconds=limit_s)
    groups = [UnixGroup(store, index, count, timeout) for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return [f.result(300) for f in [pool.submit(body, g, k) for k, g in enumerate(groups)]]


def test_large_tensors_move_both_ways_at_once() -> None:
    def body(group: UnixGroup, me: int) -> dict[str, Any]:
        mine, other = torch.full((BIG,), me + 1), 1 - me
        sent = [group.send([mine], other, tag) for tag in (3, 4)]
        theirs = {tag: torch.zeros(BIG, dtype=torch.int64) for tag in (4, 3)}
        for tag, into in theirs.items():
            group.recv([into], other, tag).wait()
        for done in sent:
            done.wait()
        whole, part, every = mine.clone(), torch.zeros(BIG // 2, dtype=torch.int64), torch.zeros(2 * BIG).long()
        group.allreduce([whole]).wait()
        group.reduce_scatter_single(part, mine).wait()
        group.all_gather_single(every, mine).wait()
        return {
            "received": [int(t.sum()) for t in theirs.values()],
            "sum": (int(whole.min()), int(whole.max())),
            "slice": (int(part.min()), int(part.max())),
            "gathered": [int(every[:BIG].sum()), int(every[BIG:].sum())],
        }

    for index, found in enumerate(members(2, body)):
        assert found == {
            "received": [BIG * (2 - index)] * 2,
            "sum": (3, 3),
            "slice": (3, 3),
            "gathered": [BIG, 2 * BIG],
        }


def test_a_large_sum_of_three_is_made_slice_by_slice_and_wraps() -> None:
    def body(group: UnixGroup, me: int) -> Any:
        x, floats = torch.arange(BIG + 1).reshape(-1, 1) + (1 << 62), torch.tensor([0.5, 0.25])
        group.allreduce([x]).wait()
        group.allreduce([floats]).wait()
        wanted = 3 * torch.arange(BIG + 1) - (1 << 62)  # which 3 * 2^62 wraps to
        return bool((x.reshape(-1) == wanted).all()), floats.tolist()

    assert members(3, body) == [(True, [1.5, 0.75])] * 3


@pytest.mark.parametrize("count", [by_halves.MEMBERS + 1, 11, 16])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_many_members_gather_and_add_up_the_same_by_halves(count: int, dtype: torch.dtype) -> None:
    """Two operations at once, of which no member has ended the first when another starts the second."""
    made = torch.Generator().manual_seed(count)
    rows = (torch.randn(count, count * 3, generator=made) * 1e6).to(dtype)

    def body(group: UnixGroup, me: int) -> list[Any]:
        summed, every, part = rows[me].clone(), torch.empty(rows.shape, dtype=dtype), torch.empty((3, 1), dtype=dtype)
        begun = [group.reduce_scatter_single(part, rows[me]), group.all_gather_single(every, rows[me])]
        begun.append(group.allreduce([summed]))
        for one in begun:
            one.wait()
        return [summed, every, part.reshape(-1), group.messages]

    found = members(count, body)
    total = rows.sum(0, dtype=rows.dtype)
    for me, (summed, every, part, messages) in enumerate(found):
        assert torch.equal(every, rows)
        assert torch.equal(summed, found[0][0])  # floats, too: all members hold the same bits
        torch.testing.assert_close(summed, total, rtol=1e-4, atol=1.0)
        torch.testing.assert_close(part, total.reshape(count, 3)[me], rtol=1e-4, atol=1.0)
        assert messages == 3 * math.ceil(math.log2(count))


def test_large_blocks_of_many_members_go_directly() -> None:
    count, n = by_halves.MEMBERS + 1, by_halves.BYTES // 8 + 1

    def body(group: UnixGroup, me: int) -> tuple[int, int]:
        every = torch.empty(count * n, dtype=torch.int64)
        group.all_gather_single(every, torch.full((n,), me)).wait()
        return int(every.sum()), group.messages

    assert members(count, body) == [(n * sum(range(count)), count - 1)] * count


def test_a_member_of_many_that_is_gone_ends_the_wait_of_all() -> None:
    """Those that do not wait for it wait for one that does, and whose connections end with it."""
    count = by_halves.MEMBERS + 1

    def body(group: UnixGroup, me: int) -> str:
        group.allreduce([torch.ones(1)]).wait()
        try:
            if me:
                group.allreduce([torch.ones(1)]).wait()
        except RuntimeError as error:
            return str(error)
        finally:  # as a worker's end does
            for line in group._lines.values():
                line.close()
        return "gone"

    first, *others = members(count, body)
    assert first == "gone"
    assert all(re.match("a member (is gone|closed the connection)", told) for told in others), others


def test_a_member_that_ends_is_noticed_at_once_by_who_waits_for_it() -> None:
    def body(group: UnixGroup, me: int) -> str:
        group.allreduce([torch.ones(1)]).wait()
        if me == 1:
            group._lines[0].close()
            return "gone"
        with pytest.raises(RuntimeError, match="a member closed the connection"):
            group.recv([torch.zeros(1)], 1, 1).wait()
        return "noticed"

    assert members(2, body) == ["noticed", "gone"]


def test_an_operation_is_done_though_a_later_one_has_begun_that_nobody_takes_yet() -> None:
    """As gradients are: each layer's sum is begun as soon as it is there, and waited for in the order of the steps."""

    def body(group: UnixGroup, me: int) -> list[int]:
        mine, sums = torch.full((2 * BIG,), me + 1), [torch.zeros(BIG, dtype=torch.int64) for _ in range(3)]
        begun = [group.reduce_scatter_single(into, mine) for into in sums]
        for one in begun:
            one.wait()
        return [int(one.max()) for one in sums]

    assert members(2, body) == [[3, 3, 3]] * 2


def test_a_message_of_another_size_is_refused_and_a_silent_member_ends_the_wait() -> None:
    ends = socket.socketpair()
    here, there = MemberConnection(ends[0], 0.05), MemberConnection(ends[1], 60.0)
    here.send(1, memoryview(b"four"))
    with pytest.raises(RuntimeError, match="4 bytes for operation 1, 2 were due"):
        there.receive(1, memoryview(bytearray(2)))
    with pytest.raises(RuntimeError, match="timed out waiting"):
        here.receive(2, memoryview(bytearray(1)))
    there.close()
    with pytest.raises(RuntimeError, match=r"a member is gone|a member closed"):
        here.receive(2, memoryview(bytearray(1)))
    here.close()


def test_a_member_that_takes_nothing_is_told_of_as_late_and_the_cure_is_named() -> None:
    ends = socket.socketpair()
    here, there = MemberConnection(ends[0], 0.05), MemberConnection(ends[1], 60.0)
    sent = here.send(1, memoryview(bytes(8 << 20)))  # more than a socket holds
    with pytest.raises(RuntimeError, match=r"timed out, a member took nothing for 0\.05 s") as late:
        here.flush(sent)
    here.close()
    there.close()
    assert "UVCC_GROUP_TIMEOUT_S" in lost(0, "dp #2 reduce_scatter did not finish", late.value).hint
    gone = lost(0, "dp #2 reduce_scatter did not finish", RuntimeError("a member closed the connection"))
    assert "UVCC_GROUP_TIMEOUT_S" not in gone.hint


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_GROUP_BACKEND", "mpi")
    place = RankAddress(Coord(0, 0, 0, 0), Topology(1, 2, 1), "127.0.0.1", 1)
    with pytest.raises(ConfigError, match="UVCC_GROUP_BACKEND is 'mpi'"):
        PartyGroups(place, device="cpu", timeout_s=1.0, on_event=lambda name, fields: None)
