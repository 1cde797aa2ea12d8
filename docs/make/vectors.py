"""Test vectors: inputs of the specifications' readers, with what ours makes of each. Another reader is held to them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BEATS: Final = (
    '{"ts": 1.5, "rank": 0, "coord": "p0r0s0t0", "pid": 7, "step": 3, "phase": "train", "loss": 0.5, "mem_mib": 91.5}',
    '{"step": 3, "phase": "train", "loss": NaN}',
    '{"step": 3, "phase": "train", "pid": "seven", "mem_mib": "much"}',
    '{"step": -2, "phase": "train"}',
    '{"step": "3", "phase": "train"}',
    '{"step": 3, "phase": "train", "coord": "p9r0s0t0"}',
    '{"step": 3, "phase": "train"',
    "[]",
)
EVENTS: Final = (
    '{"ts": 2.0, "seq": 0, "level": "info", "event": "halted", "fields": {"coord": "p1r0s0t0", "step": 5}}',
    '{"ts": 2.0, "seq": 1, "level": "loud", "event": "my_own_event", "fields": {}}',
    '{"ts": 2.0, "seq": 2, "level": "info", "fields": {}}',
    '{"ts": 2.0, "seq": 3, "level": "info", "event": "halted", "fields": {"step": -7}}',
)
CONTROLS: Final = (
    "",
    "please stop",
    '{"mode": "hold", "nonce": "a1", "run": "mine", "deadline": 0}',
    '{"mode": "release", "nonce": "a1", "run": "mine", "deadline": 0}',
    '{"mode": "halt", "nonce": "b2", "run": "mine", "deadline": 0}',
    '{"mode": "halt", "nonce": "b2", "run": "another", "deadline": 0}',
    '{"mode": "sideways", "nonce": "b2", "run": "mine", "deadline": 0}',
    '{"mode": "hold", "nonce": "c3", "run": "mine", "deadline": 10.0}',
)
TOLD: Final = (
    '{"op": "ack", "nonce": "n1", "ok": true}',
    '{"op": "ack", "nonce": "n1", "ok": false, "code": "final", "error": "the run is halting"}',
    '{"op": "lines", "run": "r", "src": "events.jsonl", "ino": 1, "off": 9, "seq": 1, "ts": 1.0, "lines": ["{}"]}',
    '{"op": "dropped", "run": "r", "src": "events.jsonl", "n": 4}',
    '{"op": "proc", "run": "r", "coord": "p0r0s0t0", "pid": 7, "state": "exited", "rc": 4, "ts": 1.0}',
    '{"op": "proc", "run": "r", "coord": "p0r0s0t0", "pid": 7, "state": "asleep", "ts": 1.0}',
    '{"op": "sing", "run": "r"}',
    '{"run": "r"}',
)


def _plain(found: object) -> Any:
    """A record as JSON; numbers that are none as text."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {f.name: _plain(getattr(found, f.name)) for f in dataclasses.fields(found)}
    if isinstance(found, Mapping):
        return {str(k): _plain(v) for k, v in found.items()}
    if isinstance(found, Sequence) and not isinstance(found, str | bytes):
        return [_plain(v) for v in found]
    if isinstance(found, float) and found != found:
        return "NaN"
    return found


def _read(found: object) -> dict[str, Any]:
    """A record with the name of its kind; of what is malformed only that it is so: reasons are texts."""
    kind = type(found).__name__
    return {"kind": kind} if kind == "Malformed" else {"kind": kind, **_plain(found)}


def written(about: str, **parts: Any) -> str:
    return json.dumps({"about": about, **parts}, indent=1, allow_nan=False) + "\n"


def run_contract() -> str:
    """Heartbeats, events and control files."""
    from uvcc_engine.contract.run_files import control, files, records

    asked = []
    with tempfile.TemporaryDirectory() as folder:
        for text in CONTROLS:
            (Path(folder) / files.HALT).write_text(text, encoding="utf-8")
            found = control.read_halt(Path(folder), "mine")
            asked.append({"file": text, "asks": _plain(found) if found is not None else None})
    return written(
        "What a reader of a run directory makes of lines and of the control file of run 'mine'.",
        heartbeats=[{"line": line, "read": _read(records.parse("heartbeat_rank0.jsonl", line))} for line in BEATS],
        events=[{"line": line, "read": _read(records.parse("events.jsonl", line))} for line in EVENTS],
        control=asked,
    )


def agent_protocol() -> str:
    """Lines of an agent."""
    from uvcc_engine.contract.agent_protocol import agent_messages

    return written(
        "What a console makes of an agent's lines.",
        told=[{"line": line, "read": _read(agent_messages.parse(line))} for line in TOLD],
    )


def relay_exchange() -> str:
    """Requests and replies of ``/exchange``."""
    from uvcc_engine.relay import binary

    item = binary.Item(receiver=1, slot=binary.STORE, ttl_s=60, msg_id=b"m-1", payload=b"sealed")
    asked = b"".join(bytes(p) for p in binary.request_pieces(7, 9, 250, 4096, (5, 6), [item]))
    message = binary.Message(delivery=3, sender=0, slot=binary.STORE, payload=b"sealed")
    given = b"".join(bytes(p) for p in binary.reply_pieces(0, bytes([binary.STORED, binary.DUPLICATE]), [message]))
    return written(
        "One request and one reply of the relay's combined request. Each prefix of either must be refused.",
        request={
            "hex": asked.hex(),
            "flags": 0,
            "box": 7,
            "consumer": 9,
            "wait_ms": 250,
            "max_bytes": 4096,
            "acks": [5, 6],
            "items": [{"receiver": 1, "slot": 0, "ttl_s": 60, "msg_id": "m-1", "payload": b"sealed".hex()}],
        },
        reply={
            "hex": given.hex(),
            "flags": 0,
            "fates": ["enqueued", "dedup"],
            "messages": [{"delivery": 3, "sender": 0, "slot": 0, "payload": b"sealed".hex()}],
        },
    )


def evidence() -> str:
    """Identifiers, trees and roots of small inputs."""
    from uvcc_engine.contract import ids
    from uvcc_engine.contract.parsing.canonical import canonical
    from uvcc_engine.transcript.formats import kinds
    from uvcc_engine.transcript.leaves import merkle

    job = hashlib.sha256(b"a policy").digest()
    replica = ids.sid_replica(job, 1)
    leaves = [bytes([n]) * 3 for n in range(5)]
    sub = ids.sid_sub(replica, 2, 3)
    value = {"b": 1, "a": [1.5, 1e21, 0.000001], "\u20ac": "\n\u00e9"}
    return written(
        "Identifiers, Merkle trees, leaves, canonical JSON of small inputs (evidence, sections 1 to 5). Bytes in hex.",
        canonical={"value": value, "text": canonical(value).decode()},
        ids={
            "sid_job": job.hex(),
            "sid_replica(1)": replica.hex(),
            "sid_sub(1, 2, 3)": sub.hex(),
        },
        leaves=[_recorded(sub, kinds.RESHARE, 1, 2), _recorded(sub, kinds.CHECKPOINT, 1, 1)],
        trees=[
            {"leaves": [x.hex() for x in leaves[:n]], "root": merkle.tree_root(map(_leaf, leaves[:n])).hex()}
            for n in range(len(leaves) + 1)
        ],
    )


def _leaf(data: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + data).digest()


def _recorded(sub: bytes, kind: int, src: int, dst: int) -> dict[str, str | int]:
    """The leaf of a short payload in epoch 7, at whoever sent it."""
    from uvcc_engine.transcript.leaves import leaf

    key, payload = hashlib.sha256(b"a pair").digest(), b"a share"
    epoch = leaf.epoch_key(key, sub, 7)
    record, blind = leaf.make_record(epoch, (3, 10, 0, leaf.SENT, src, dst, kind), payload)
    return {
        "sid_sub": sub.hex(),
        "epoch": 7,
        "blinding_key": key.hex(),
        "payload": payload.hex(),
        "blind": blind.hex(),
        "record": record.hex(),
        "leaf": leaf.leaf_hash(leaf.epoch_prefix(sub, 7), record).hex(),
    }


def frames() -> str:
    """One frame, and labels of messages."""
    from uvcc_engine.plane import frame
    from uvcc_engine.plane.api import Tag

    sub = hashlib.sha256(b"a subsession").digest()
    body = b"any sealed body"
    aad = frame.pack_header(frame.DATA, 0, 1, frame.sid64(sub), 77, 3, 0, 41, len(body))
    label = frame.Labeler(sub, 0, 1)
    tags = [Tag(epoch=5, stream=3, op=9, kind=2), Tag(epoch=6, stream=3, op=9, kind=2)]
    return written(
        "A frame with any body, the nonce of its seal, and labels (frames and sessions). Any damaged byte is refused.",
        frame={
            "hex": (frame.finish(aad, body) + body).hex(),
            "class": frame.DATA,
            "src": 0,
            "dst": 1,
            "sid_sub": sub.hex(),
            "session": 77,
            "stream": 3,
            "generation": 0,
            "seq": 41,
            "body": body.hex(),
            "nonce": frame.nonce(3, 41).hex(),
        },
        labels=[
            {
                "epoch": t.epoch,
                "stream": t.stream,
                "op": t.op,
                "kind": t.kind,
                "chunk": c,
                "chunks": n,
                "label": label(t, c, n),
            }
            for t in tags
            for c, n in ((0, 1), (1, 3))
        ],
    )
