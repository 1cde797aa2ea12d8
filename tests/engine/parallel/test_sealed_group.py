"""Collectives between a party's machines: bit for bit those of one machine, and nothing on the way goes unnoticed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import sealed_kit
import torch
import torch.distributed as dist
from parallel_kit import party_keys, pod

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.parallel import by_halves, meeting, sealed_group
from uvcc_engine.parallel.party_keys import PartyKeys, stays_here
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.parallel.sealed_group import SealedConnection
from uvcc_engine.parallel.sealed_stream import RECORD_BYTES, SealedStream, StrangerError
from uvcc_engine.parallel.unix_group import UnixGroup

BIG = (3 * RECORD_BYTES) // 8 + 5  # of int64: three whole records and a bit


def on_one_machine(count: int, body: Callable[[UnixGroup, int], Any]) -> list[Any]:
    store = dist.HashStore()
    groups = [UnixGroup(store, index, count, timedelta(seconds=60)) for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return [f.result(300) for f in [pool.submit(body, g, k) for k, g in enumerate(groups)]]


def everything(group: UnixGroup, me: int) -> list[torch.Tensor]:
    """The results of every collective, on words that use all bits and on floats whose sums depend on the order."""
    count = group.size()
    draw, found = torch.Generator().manual_seed(me), []

    def words(n: int) -> torch.Tensor:
        return torch.randint(-(2**63), 2**63 - 1, (n,), generator=draw)

    for x in (words(3), words(BIG), torch.rand(1001, generator=draw), words(0)):
        group.allreduce([x]).wait()
        found.append(x)
    for root in range(count):
        x, options = words(BIG // 2), dist.BroadcastOptions()
        options.rootRank = root
        group.broadcast([x], options).wait()
        found.append(x)
    every, mine = torch.zeros(count * 77, dtype=torch.int64), words(77)
    group.all_gather_single(every, mine).wait()
    part = torch.zeros(BIG // count, dtype=torch.int64)
    group.reduce_scatter_single(part, words(BIG // count * count)).wait()
    last, first = (me - 1) % count, (me + 1) % count
    sent = [group.send([words(n)], first, tag) for tag, n in ((3, BIG), (4, 1))]
    later, sooner = torch.zeros(1, dtype=torch.int64), torch.zeros(BIG, dtype=torch.int64)
    group.recv([later], last, 4).wait()  # the one that was sent second is asked for first
    group.recv([sooner], last, 3).wait()
    for done in sent:
        done.wait()
    return [*found, every, part, later, sooner]


@pytest.mark.parametrize("count", [2, 3, by_halves.MEMBERS + 1])
def test_every_collective_gives_the_same_bits_as_on_one_machine(count: int) -> None:
    for sealed, plain in zip(sealed_kit.members(count, everything), on_one_machine(count, everything), strict=True):
        assert len(sealed) == len(plain)
        assert all(torch.equal(a, b) for a, b in zip(sealed, plain, strict=True))


def test_tensors_of_another_device_come_back_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is treated as one that the host's processor cannot reach."""
    monkeypatch.setattr(sealed_group, "on_host", torch.clone)
    monkeypatch.setattr(sealed_group, "room_on_host", torch.zeros_like)
    for copied, plain in zip(sealed_kit.members(2, everything), on_one_machine(2, everything), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(copied, plain, strict=True))


def test_keys_change_on_the_way_and_every_record_still_opens() -> None:
    with sealed_kit.connection(rekey=2) as (one, two):
        for k in range(9):
            one.write(b"", bytes([k]) * 100)
        room = bytearray(900)
        two.fill(memoryview(room))
        assert bytes(room) == b"".join(bytes([k]) * 100 for k in range(9))
        assert one.generation == 4


def _changed(sealed: list[bytes]) -> list[bytes]:
    return [sealed[0], sealed[1][:-1] + bytes([sealed[1][-1] ^ 1])]


def _longer(sealed: list[bytes]) -> list[bytes]:
    return [sealed[0], (1 << 30).to_bytes(4, "little") + sealed[1][4:]]


@pytest.mark.parametrize(
    "on_the_way",
    [_changed, _longer, lambda s: [s[0], s[0]], lambda s: s[1:], lambda s: s[::-1], lambda s: [s[0], s[2], s[1]]],
    ids=["changed", "longer", "repeated", "left out", "backwards", "moved"],
)
def test_what_was_changed_on_the_way_ends_the_connection(on_the_way: Callable[[list[bytes]], list[bytes]]) -> None:
    with sealed_kit.connection() as (one, two):
        sealed = [bytes(r) for k in range(3) for r in one.records(b"", memoryview(bytes([k]) * 64))]
        one.sock.sendall(b"".join(on_the_way(sealed)))
        with pytest.raises(StrangerError, match="was changed on the way"):
            two.fill(memoryview(bytearray(192)))


def test_a_reflected_record_is_no_record_of_the_other_side() -> None:
    with sealed_kit.connection() as (one, two):
        mine = b"".join(bytes(r) for r in one.records(b"", memoryview(b"abc")))
        two.sock.sendall(mine)
        with pytest.raises(StrangerError, match="was changed on the way"):
            one.fill(memoryview(bytearray(3)))


def test_a_member_that_is_silent_slow_or_gone_ends_the_wait_with_its_name() -> None:
    with sealed_kit.connection() as (one, two):
        here, there = SealedConnection(one, 0.05), SealedConnection(two, 5.0)
        here.send(1, memoryview(b"four"))
        with pytest.raises(RuntimeError, match="4 bytes for operation 1, 2 were due"):
            there.receive(1, memoryview(bytearray(2)))
        with pytest.raises(RuntimeError, match="timed out waiting for a member"):
            here.receive(2, memoryview(bytearray(1)))
        there.close()
        with pytest.raises(RuntimeError, match="a member is gone"):
            here.receive(2, memoryview(bytearray(1)))


# -- who is let in -----------------------------------------------------------------------------------------------------

SIZE = Topology(3)
STRANGERS: dict[str, tuple[PartyKeys, int]] = {
    "another pod's key under this pod's rank": (party_keys(SIZE, 2), 1),
    "another party's pod": (party_keys(SIZE, 1, party=1), 1),
    "the key of another job": (party_keys(SIZE, 1, sid_job=b"K" * 32), 1),
    "a key that nobody knows": (PartyKeys.of(pod(40), [pod(r).public for r in range(3)], b"J" * 32, 0, SIZE), 1),
    "a rank that there is not": (PartyKeys.of(pod(1), [pod(r).public for r in range(3)], b"J" * 32, 0, SIZE), 7),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_turned_away_and_a_sister_let_in(who: str) -> None:
    keys, rank = STRANGERS[who]
    events: sealed_kit.Events = []
    with sealed_kit.open_door(party_keys(SIZE, 0), events=events) as door:
        with pytest.raises(StrangerError):
            sealed_kit.dial(door, keys, rank)
        sealed_kit.dial(door, party_keys(SIZE, 2), 2).close()
        door.take(sealed_kit.MEETING, 2, 20.0).close()
        with pytest.raises(TimeoutError):
            door.take(sealed_kit.MEETING, rank, 0.05)
    assert events[0][0] == "connections_rejected"
    assert events[0][1]["why"] in ("not by a pod of this party", "for another rank")


@pytest.mark.parametrize(
    "junk", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"x" * 100, b"\0" * 64, b"UVCP\1" + b"\0" * 59]
)
def test_bytes_without_a_key_are_not_answered(junk: bytes) -> None:
    with sealed_kit.open_door(party_keys(SIZE, 0)) as door:
        with socket.create_connection((sealed_kit.HERE, door.port), 120.0) as sock:
            answer = b""
            with contextlib.suppress(OSError):  # it may be turned away before it has said all
                sock.sendall(junk)
                sock.shutdown(socket.SHUT_WR)
                while more := sock.recv(4096):
                    answer += more
        assert len(answer) <= 32  # random bytes for the knock, and no more
        sealed_kit.dial(door, party_keys(SIZE, 1), 1).close()


def test_many_silent_connections_do_not_keep_a_sister_out() -> None:
    with sealed_kit.open_door(party_keys(SIZE, 0)) as door, contextlib.ExitStack() as held:
        for _ in range(300):
            held.enter_context(socket.create_connection((sealed_kit.HERE, door.port), 120.0))
        sealed_kit.dial(door, party_keys(SIZE, 1), 1).close()
        door.take(sealed_kit.MEETING, 1, 20.0).close()


def _recorded(door_port: int, said: list[bytes]) -> int:
    """The port of a forwarder to a door that keeps what the caller says."""
    listener = socket.create_server((sealed_kit.HERE, 0))

    def pump(source: socket.socket, sink: socket.socket, keep: list[bytes] | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep is not None:
                    keep.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        caller, _ = listener.accept()
        onward = socket.create_connection((sealed_kit.HERE, door_port))
        threading.Thread(target=pump, args=(onward, caller, None), daemon=True).start()
        pump(caller, onward, said)
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def test_a_recorded_handshake_opens_nothing_a_second_time() -> None:
    said: list[bytes] = []
    events: sealed_kit.Events = []
    with sealed_kit.open_door(party_keys(SIZE, 0), events=events) as door:
        where = (sealed_kit.HERE, _recorded(door.port, said))
        about = sealed_kit.of_group(sealed_kit.MEETING)
        stream = sealed_group.sealed_stream.dial(party_keys(SIZE, 1), 1, 0, where, about, 20.0)
        door.take(sealed_kit.MEETING, 1, 20.0)
        stream.close()
        with socket.create_connection((sealed_kit.HERE, door.port), 120.0) as again:
            again.sendall(b"".join(said))
            with contextlib.suppress(ConnectionError):
                while again.recv(4096):
                    pass
        with pytest.raises(TimeoutError):
            door.take(sealed_kit.MEETING, 1, 0.05)
    assert [f["why"] for _, f in events] == ["not by a pod of this party"]


def test_who_listens_must_be_the_rank_that_was_called() -> None:
    """An address that leads to another pod, or to somebody who has no key of this party, gives no connection."""
    with sealed_kit.open_door(party_keys(SIZE, 2), rank=2) as elsewhere, pytest.raises(StrangerError):
        sealed_kit.dial(elsewhere, party_keys(SIZE, 1), 1, rank=0)
    stranger = PartyKeys.of(pod(40), [pod(r).public for r in range(3)], b"J" * 32, 0, SIZE)
    with sealed_kit.open_door(stranger, rank=0) as imposter, pytest.raises(StrangerError):
        sealed_kit.dial(imposter, party_keys(SIZE, 1), 1, rank=0)


def test_an_imposter_that_waves_everybody_through_cannot_finish_the_handshake() -> None:
    with socket.create_server((sealed_kit.HERE, 0)) as listener:

        def echo() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(bytes(32))
                sock.recv(64, socket.MSG_WAITALL)
                while data := sock.recv(4096):
                    sock.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        where = (sealed_kit.HERE, int(listener.getsockname()[1]))
        with pytest.raises(StrangerError):
            sealed_group.sealed_stream.dial(party_keys(SIZE, 1), 1, 0, where, b"store", 20.0)


# -- which worlds may meet ---------------------------------------------------------------------------------------------


def test_what_stays_on_this_machine_is_told_by_the_address_alone() -> None:
    assert all(map(stays_here, ("127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost")))
    assert not any(map(stays_here, ("10.0.0.1", "0.0.0.0", "::", "127.evil.example", "pod-1", "", "fe80::1")))


@pytest.mark.parametrize("address", ["10.0.0.1", "pod-1.example", "127.evil.example"])
def test_a_world_beyond_this_machine_is_refused_without_keys(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, keys = RankAddress(Coord(0, 1, 0, 0), Topology(2), address, 9), party_keys(Topology(2), 0)
    with pytest.raises(ConfigError, match="beyond this machine, and has no keys to seal it") as refused:
        meeting.is_sealed(place, None)
    assert "policy that names the party's pods" in refused.value.hint
    assert meeting.is_sealed(place, keys)
    for clear in ("gloo", "unix"):
        monkeypatch.setenv("UVCC_GROUP_BACKEND", clear)
        with pytest.raises(ConfigError, match=f"UVCC_GROUP_BACKEND is '{clear}'") as refused:
            meeting.is_sealed(place, keys)
        assert "unset UVCC_GROUP_BACKEND" in refused.value.hint


def test_a_language_models_world_beyond_this_machine_is_refused_unless_it_was_accepted() -> None:
    env = {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match="beyond this machine, and its traffic is not encrypted") as refused:
        meeting.check_plain_world(env)
    assert "UVCC_GROUP_CLEAR=accept" in refused.value.hint
    meeting.check_plain_world(env | {"UVCC_GROUP_CLEAR": "accept"})
    meeting.check_plain_world(env | {"LOCAL_WORLD_SIZE": "4"})  # torchrun: all ranks are here, whatever the name
    meeting.check_plain_world(env | {"MASTER_ADDR": "127.0.0.1"})


def test_ranks_of_one_pod_listen_where_no_other_machine_reaches_them() -> None:
    env = {"NCCL_SOCKET_IFNAME": "eth0"}
    meeting.keep_here(env)
    assert set(env.values()) <= {"lo", "lo0"}
    assert set(env) == {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}


def test_a_party_needs_one_identity_for_each_of_its_pods() -> None:
    with pytest.raises(ConfigError, match="1 identities for 2 pods of P0"):
        PartyKeys.of(pod(0), [pod(0).public], b"J" * 32, 0, Topology(2))


def test_a_stream_is_closed_twice_without_harm() -> None:
    with sealed_kit.connection() as (one, _):
        assert isinstance(one, SealedStream)
        one.close()
        one.close()
