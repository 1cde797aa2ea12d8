"""A genuine run and the ways to falsify its bundle and transcripts; ``verify`` must reject every one."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import RECORD, epoch_prefix, leaf_hash
from uvcc_engine.transcript.leaves.merkle import tree_root
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.terms.policy import Policy

Json = Any


class Target:
    """One genuine run that is falsified over and over; ``pins`` are its true identities."""

    def __init__(self, bundle: Path) -> None:
        """``bundle``: a proof bundle; the transcripts lie below its folder."""
        self.bundle, self.folder = bundle, bundle.parent
        self.text = bundle.read_bytes()
        self.json = json.loads(self.text)
        self.policy = Policy.from_json(self.json["policy"])
        self.pins = {f"P{p.party}": p.public.ed25519 for p in self.policy.parties}
        self.leaves = {p.parent.name: p.read_bytes() for p in self.folder.rglob(leaf_file.LEAVES)}
        self.paths = {p.parent.name: p for p in self.folder.rglob(leaf_file.LEAVES)}
        self.failed: Counter[str] = Counter()

    def rejected(self, name: str, text: bytes | None = None, leaves: dict[str, bytes] | None = None) -> Exception:
        """Put the falsified files in place, verify, put the true ones back."""
        try:
            if text is not None:
                assert text != self.text, f"{name} changes nothing"
                self.bundle.write_bytes(text)
            for which, data in (leaves or {}).items():
                assert data != self.leaves[which], f"{name} changes nothing"
                self.paths[which].write_bytes(data)
            verify(self.bundle, allowed_signers=self.pins)
        except (VerificationError, UnreadableError) as e:
            self.failed[e.check if isinstance(e, VerificationError) else "unreadable"] += 1
            return e
        finally:
            if text is not None:
                self.bundle.write_bytes(self.text)
            for which in leaves or {}:
                self.paths[which].write_bytes(self.leaves[which])
        raise AssertionError(f"accepted: {name}")

    def rejected_json(self, name: str, change: Callable[[Json], None]) -> Exception:
        data = copy.deepcopy(self.json)
        change(data)
        return self.rejected(name, canonical(data))


def paths(value: Json, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, containers included."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*at, key))


def at(data: Json, way: tuple[Any, ...]) -> Json:
    for step in way:
        data = data[step]
    return data


def altered(value: Json) -> list[Json]:
    """Other values for one place."""
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int):
        return [value + 1, -1, float(value) + 0.5, str(value)]
    if isinstance(value, float):
        return [value + 1.0, None]
    if isinstance(value, str):
        flipped = value[:-1] + ("0" if value[-1:] != "0" else "1")
        return [flipped, value.upper() if value.upper() != value else value + "x", ""]
    if isinstance(value, list):
        return [[*value, *value[-1:]] if value else [0], value[::-1] if value[::-1] != value else None, value[1:] or 7]
    return [{}, [], {**value, "extra": 1}]


def split(data: bytes) -> list[tuple[bytes, list[bytes]]]:
    """Blocks of a transcript: (header, records)."""
    found, place = [], 0
    while place < len(data):
        head = data[place : place + leaf_file.HEADER.size]
        n = leaf_file.HEADER.unpack(head)[2]
        start = place + leaf_file.HEADER.size
        place = start + n * RECORD.size
        found.append((head, [data[i : i + RECORD.size] for i in range(start, place, RECORD.size)]))
    return found


def joined(blocks: list[tuple[bytes, list[bytes]]], *, rehash: bool = True) -> bytes:
    """Write blocks back; counts and (if asked) roots in the headers follow the records."""
    out = b""
    for head, records in blocks:
        _, epoch, _, sid, root = leaf_file.HEADER.unpack(head)
        if rehash:
            root = tree_root(leaf_hash(epoch_prefix(sid, epoch), r) for r in records)
        out += leaf_file.header(epoch, len(records), sid, root) + b"".join(records)
    return out


def with_byte(record: bytes, index: int, value: int) -> bytes:
    """A record with one byte replaced."""
    data = bytearray(record)
    data[index] = value
    return bytes(data)


# ---- what is tried -------------------------------------------------------------------------------------------------


def every_value(target: Target) -> int:
    """Each value replaced, each key removed, each list shortened, doubled and reversed, in canonical form: how many."""
    tried = 0
    for way in paths(target.json):
        if not way:
            continue
        old = at(target.json, way)
        for new in altered(old):
            if new == old and type(new) is type(old):
                continue

            def change(data: Json, way: tuple[Any, ...] = way, new: Json = new) -> None:
                at(data, way[:-1])[way[-1]] = new

            target.rejected_json(f"{way} = {str(new)[:60]}", change)
            tried += 1

        def remove(data: Json, way: tuple[Any, ...] = way) -> None:
            del at(data, way[:-1])[way[-1]]

        target.rejected_json(f"without {way}", remove)
        tried += 1
    return tried


def random_bundles(target: Target, rng: random.Random, count: int) -> None:
    """Bits flipped, bytes dropped, put in and exchanged anywhere in the bundle."""
    for i in range(count):
        data = bytearray(target.text)
        where = rng.randrange(len(data))
        how = rng.randrange(4)
        if how == 0:
            data[where] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[where : where + rng.randrange(1, 50)]
        elif how == 2:
            data[where:where] = rng.randbytes(rng.randrange(1, 5))
        else:
            other = rng.randrange(len(data))
            data[where], data[other] = data[other], data[where]
        if bytes(data) != target.text:
            target.rejected(f"random {i} at {where}", bytes(data))


def random_transcripts(target: Target, rng: random.Random, count: int) -> None:
    """The same in the files of leaves."""
    for i in range(count):
        which = rng.choice(sorted(target.leaves))
        data = bytearray(target.leaves[which])
        where = rng.randrange(len(data))
        how = rng.randrange(3)
        if how == 0:
            data[where] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[where : where + rng.choice([1, RECORD.size])]
        else:
            data[where:where] = rng.randbytes(rng.choice([1, RECORD.size]))
        target.rejected(f"transcript {i} at {where}", leaves={which: bytes(data)})


def structured(target: Target, foreign: Target) -> int:
    """Leaves dropped, doubled, moved, changed in each field; epochs swapped, cut, emptied, foreign: how many."""
    tried = 0
    for which, data in target.leaves.items():
        blocks = split(data)
        made: list[tuple[str, bytes]] = [
            ("empty", b""),
            ("cut", data[: len(data) // 2]),
            ("trailing", data + b"\0"),
            ("doubled", data + data),
            ("epochs swapped", joined([blocks[1], blocks[0], *blocks[2:]])),
            ("first epoch dropped", joined(blocks[1:])),
            ("last epoch dropped", joined(blocks[:-1])),
            ("extra epoch", joined([*blocks, (leaf_file.header(len(blocks), 0, bytes(32), bytes(32)), [])])),
            ("foreign run", foreign.leaves[which]),
            ("foreign epoch", joined([split(foreign.leaves[which])[0], *blocks[1:]])),
        ]
        for e, (head, records) in enumerate(blocks):
            moved = list(blocks)
            for i in range(len(records)):
                variants = {
                    "dropped": records[:i] + records[i + 1 :],
                    "doubled": records[: i + 1] + records[i:],
                    "moved": records[:i] + records[i + 1 :] + [records[i]],
                    "kind": [*records[:i], with_byte(records[i], 1, records[i][1] % 9 + 1), *records[i + 1 :]],
                    "direction": [*records[:i], with_byte(records[i], 0, 1 - records[i][0]), *records[i + 1 :]],
                    "digest": [*records[:i], with_byte(records[i], -1, records[i][-1] ^ 1), *records[i + 1 :]],
                    "size": [*records[:i], with_byte(records[i], 20, records[i][20] ^ 1), *records[i + 1 :]],
                }
                for name, changed in variants.items():
                    if changed == records:
                        continue
                    for rehash in (True, False) if i == 0 else (True,):
                        moved[e] = (head, changed)
                        made.append((f"{name} leaf {i} of epoch {e}", joined(moved, rehash=rehash)))
            moved[e] = (head, [])
            made.append((f"epoch {e} emptied", joined(moved)))
            moved[e] = (head, records[:1])
            made.append((f"epoch {e} of a single leaf", joined(moved)))
        for name, changed in made:
            target.rejected(f"{which}: {name}", leaves={which: changed})
            tried += 1
    return tried
