"""The store where a party's ranks meet: what torch's own says, for its own ranks only, whatever they ask."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sealed_kit
import torch.distributed as dist
from parallel_kit import party_keys

from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.parallel import sealed_stream
from uvcc_engine.parallel.sealed_door import STORE, Door
from uvcc_engine.parallel.sealed_store import SealedStore, StoreValues, serve
from uvcc_engine.parallel.sealed_stream import SealedStream, StrangerError

SIZE = Topology(2)


@contextlib.contextmanager
def served() -> Iterator[tuple[SealedStore, Door]]:
    """Rank 0's store, and the door that others reach it through."""
    values = StoreValues()
    with sealed_kit.open_door(party_keys(SIZE, 0)) as door:
        door.serve_store(lambda stream: serve(values, stream))
        yield SealedStore(values, None, 20.0), door


def stream(door: Door) -> SealedStream:
    return sealed_stream.dial(party_keys(SIZE, 1), 1, 0, (sealed_kit.HERE, door.port), STORE, 20.0)


def joined(door: Door) -> SealedStore:
    return SealedStore(None, stream(door), 20.0)


def asked(store: Any) -> list[Any]:
    """Everything that torch may ask of a store, through its own prefixes as well."""
    inner = dist.PrefixStore("a", store)
    inner.set("k", "v")
    inner.set("bytes", b"\x00\xff")
    found: list[Any] = [bytes(inner.get("k")), bytes(inner.get("bytes")), bytes(store.get("a/k"))]
    found += [inner.add("n", 2), inner.add("n", -5), bytes(inner.get("n"))]
    found += [store.check(["a/k", "a/n"]), store.check(["a/k", "missing"])]
    found += [bytes(inner.compare_set("swap", "", "first")), bytes(inner.compare_set("swap", "first", "second"))]
    found += [bytes(inner.compare_set("swap", "first", "third")), bytes(inner.get("swap"))]
    found += [store.delete_key("a/k"), store.delete_key("a/k"), store.check(["a/k"])]
    inner.wait(["n"])
    store.wait(["a/n"], timedelta(seconds=5))
    return found


def test_it_answers_as_torchs_own_store_does_at_both_ends() -> None:
    wanted = asked(dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False))
    with served() as (store, door):
        there = joined(door)
        assert asked(there) == wanted
        assert store.num_keys() == there.num_keys() == 3  # bytes, n and swap
        store.delete_key("a/n")
        store.delete_key("a/swap")
        assert asked(store) == wanted
        assert bytes(there.get("a/bytes")) == b"\x00\xff"


def test_a_wait_ends_when_the_value_comes_and_names_what_never_came() -> None:
    with served() as (store, door):
        there = joined(door)
        setting = threading.Thread(target=store.set, args=("late", "x"))
        setting.start()
        assert bytes(there.get("late")) == b"x"
        setting.join()
        with pytest.raises(RuntimeError, match=r"wait timeout after 0.01 s, keys: never"):
            there.wait(["never"], timedelta(seconds=0.01))
        there.set_timeout(timedelta(seconds=0.01))
        with pytest.raises(RuntimeError, match="never"):
            there.get("never")
        assert bytes(there.get("late")) == b"x"  # and goes on


def test_a_store_that_is_gone_is_an_error_each_time() -> None:
    with served() as (_, door):
        there, line = stream(door), stream(door)
        store = SealedStore(None, there, 20.0)
        SealedStore(None, line, 20.0).close()
        store.set("k", "v")
        there.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the party's store is gone"):
            store.check(["k"])


@pytest.mark.parametrize(
    "message",
    [
        [b"erase"],
        [b"set", b"k"],
        [b"add", b"k", b"many"],
        [b"add", b"k", b"9" * 5000],
        struct.pack("<I", 2) + b"\1\0",
        struct.pack("<II", 4, 1 << 31),
        struct.pack("<I", 1 << 31),
    ],
    ids=["unknown", "short", "no number", "long number", "half a part", "long part", "more than memory"],
)
def test_a_request_that_is_none_ends_its_connection_and_nothing_else(message: list[bytes] | bytes) -> None:
    with served() as (store, door):
        bad, good = stream(door), joined(door)
        raw = message
        if isinstance(raw, list):
            parts = b"".join(struct.pack("<I", len(part)) + part for part in raw)
            raw = struct.pack("<I", len(parts)) + parts
        bad.write(b"", raw)
        with pytest.raises(ConnectionError):
            bad.fill(memoryview(bytearray(1 << 10)))
        good.set("k", "v")
        assert bytes(store.get("k")) == b"v"


def test_a_stranger_cannot_join_the_store() -> None:
    with served() as (store, door):
        for keys, rank in ((party_keys(SIZE, 1, party=2), 1), (party_keys(SIZE, 1, sid_job=b"other".ljust(32)), 1)):
            with pytest.raises(StrangerError):
                sealed_stream.dial(keys, rank, 0, (sealed_kit.HERE, door.port), STORE, 20.0)
        with pytest.raises(RuntimeError):  # torch's client, which has no key at all
            dist.TCPStore("127.0.0.1", door.port, None, False, timedelta(seconds=2), False)
        assert store.num_keys() == 0
