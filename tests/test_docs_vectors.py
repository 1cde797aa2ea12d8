"""The specifications' test vectors, held against readers that are not the ones that made them, where there are such."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from blake3 import blake3

from uvcc_engine.plane import frame
from uvcc_engine.relay import binary

ROOT: Final = Path(__file__).parents[1]
VECTORS: Final = ROOT / "docs" / "specifications" / "vectors"


def _of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_a_request_and_a_reply_of_the_relay_read_back_and_no_prefix_does() -> None:
    found = _of("relay-exchange")
    asked, given = bytes.fromhex(found["request"]["hex"]), bytes.fromhex(found["reply"]["hex"])
    request = binary.read_request(asked)
    assert (request.box, request.consumer, list(request.acks)) == (7, 9, [5, 6])
    assert [bytes(i.payload).hex() for i in request.items] == [i["payload"] for i in found["request"]["items"]]
    assert [binary.FATES[f] for f in binary.read_reply(given).fates] == found["reply"]["fates"]
    for n in range(len(asked)):
        with pytest.raises(ValueError):
            binary.read_request(asked[:n])
    for n in range(len(given)):
        with pytest.raises(ValueError):
            binary.read_reply(given[:n])


def test_a_frame_is_what_the_specification_says_and_damage_is_found() -> None:
    found = _of("frame")["frame"]
    data = bytes.fromhex(found["hex"])
    magic, version, cls, src, dst, sid, session, stream, generation, seq, length, _ = struct.unpack_from(
        "<4sBBBBQQIIQII", data
    )
    assert (magic, version, cls, src, dst) == (b"UVCF", 1, found["class"], found["src"], found["dst"])
    assert sid == int.from_bytes(hashlib.sha256(bytes.fromhex(found["sid_sub"])).digest()[:8], "little")
    assert [session, stream, generation, seq] == [found[k] for k in ("session", "stream", "generation", "seq")]
    assert data[48:].hex() == found["body"]
    assert length == len(data) - 48
    assert bytes.fromhex(found["nonce"]) == struct.pack("<IQ", stream, seq << 1)
    frame.check_crc(frame.read_header(data), data[48:])
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises(frame.ProtocolError):
            frame.check_crc(frame.read_header(bad), bad[48:])


def test_labels_follow_from_the_formula() -> None:
    found = _of("frame")
    sub = bytes.fromhex(found["frame"]["sid_sub"])
    for m in found["labels"]:
        packed = struct.pack(
            "<QBBBBIII", m["epoch"] << 32 | m["stream"], 0, 1, 0x21, m["kind"], m["op"], m["chunk"], m["chunks"]
        )
        digest = hashlib.sha256(b"uvcc.msgid.v1" + sub + packed).digest()
        assert int.from_bytes(digest[:4], "little") == m["label"]


def _tree(leaves: list[bytes]) -> bytes:
    """RFC 9162, section 2.1.1, word for word."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = 1
    while 2 * k < len(leaves):
        k *= 2
    return hashlib.sha256(b"\x01" + _tree(leaves[:k]) + _tree(leaves[k:])).digest()


def test_trees_and_identifiers_follow_from_the_text() -> None:
    found = _of("evidence")
    for tree in found["trees"]:
        assert _tree([bytes.fromhex(x) for x in tree["leaves"]]).hex() == tree["root"]
    ids = found["ids"]
    replica = hashlib.sha256(b"UVCC_SID_REPLICA_V1" + bytes.fromhex(ids["sid_job"]) + struct.pack("<I", 1)).digest()
    assert replica.hex() == ids["sid_replica(1)"]
    sub = hashlib.sha256(b"UVCC_SID_SUB_V1" + replica + struct.pack("<BH", 2, 3)).hexdigest()
    assert sub == ids["sid_sub(1, 2, 3)"]
    assert json.loads(found["canonical"]["text"]) == found["canonical"]["value"]
    digests = set()
    for told in found["leaves"]:
        key, blind, payload, record = (bytes.fromhex(told[n]) for n in ("blinding_key", "blind", "payload", "record"))
        tail = bytes.fromhex(told["sid_sub"]) + struct.pack("<I", told["epoch"])
        epoch_key = blake3(b"UVCC_BLIND_V2" + tail, key=key).digest()
        assert blind == blake3(record[1:20], key=epoch_key).digest()
        ways = {"opened": hashlib.sha256(blind + payload).digest(), "closed": blake3(payload, key=blind).digest()}
        digests |= {way for way, digest in ways.items() if digest == record[28:]}
        assert told["leaf"] == hashlib.sha256(b"\0UVCC_LEAF_V1" + tail + record).hexdigest()
    assert digests == {"opened", "closed"}


def test_the_contracts_vectors_hold_every_outcome() -> None:
    contract, agent = _of("run-contract"), _of("agent-protocol")
    assert {b["read"]["kind"] for b in contract["heartbeats"]} == {"Heartbeat", "Malformed"}
    assert {b["read"]["kind"] for b in contract["events"]} == {"EngineRecord", "Malformed"}
    assert {(c["asks"] or {}).get("mode") for c in contract["control"]} == {"halt", "hold", "release", None}
    assert {t["read"]["kind"] for t in agent["told"]} >= {
        "Ack",
        "Lines",
        "Dropped",
        "WorkerChange",
        "Unknown",
        "Malformed",
    }


@pytest.mark.parametrize("name", ["standalone_verify.py", "leaf_proof.py"])
def test_every_section_that_a_verifier_cites_is_there(name: str) -> None:
    proof = ROOT / "uvcc_engine" / "transcript" / "proof"
    text = re.sub(r"RFC \d+,? section [\d.]+", "", (proof / name).read_text(encoding="utf-8"))
    cited = {n for found in re.findall(r"[Ss]ections? ([\d.]*\d)(?: to ([\d.]*\d))?", text) for n in found if n}
    spec = (proof / "EVIDENCE.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\.? ", spec, re.MULTILINE))
    assert cited
    assert cited <= sections, sorted(cited - sections)
    if name == "standalone_verify.py":  # it cites every section that says what is checked
        assert {s for s in sections if "." not in s} - cited <= {"7", "8", "13", "14", "15"}


def _written(folder: Path, found: dict[str, Any]) -> Path:
    """The vector's run as files of a package without a manifest, and the keys to expect."""
    for name, text in [*found["texts"].items(), *found["leaves"].items()]:
        path = folder / "full" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes.fromhex(text) if name in found["leaves"] else text.encode())
    (folder.parent / "keys").write_text("".join(f"{who} {key}\n" for who, key in found["keys"].items()))
    return folder


def _sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def test_a_whole_run_s_roots_follow_from_the_text() -> None:
    found = _of("bundle")
    policy = found["texts"]["policy.json"].strip().encode()
    job = _sha(b"UVCC_SID_JOB_V1", _sha(policy))
    assert (_sha(policy).hex(), job.hex()) == (found["policy_hash"], found["sid_job"])
    replica = _sha(b"UVCC_SID_REPLICA_V1", job, struct.pack("<I", 0))
    sub = _sha(b"UVCC_SID_SUB_V1", replica, struct.pack("<BH", 0, 0))
    roots: list[list[bytes]] = []  # by party, by epoch
    for name in sorted(found["leaves"]):
        data, at = bytes.fromhex(found["leaves"][name]), 0
        roots.append([])
        while at < len(data):
            magic, epoch, count = struct.unpack_from("<8sIQ", data, at)
            stated, root = data[at + 20 : at + 52], data[at + 52 : at + 84]
            assert (magic, epoch, stated) == (b"UVCCEPO1", len(roots[-1]), sub)
            records = [data[at + 84 + 60 * n : at + 144 + 60 * n] for n in range(count)]
            head = sub + struct.pack("<I", epoch)
            assert _tree([b"UVCC_LEAF_V1" + head + record for record in records]) == root
            roots[-1].append(root)
            at += 84 + 60 * count
    found_global = []
    for epoch in range(found["epochs"]):
        at_epoch = struct.pack("<I", epoch)
        one = _sha(b"UVCC_REPLICA_ROOT_V1", replica, at_epoch, *(party[epoch] for party in roots))
        found_global.append(_sha(b"UVCC_GLOBAL_ROOT_V1", job, at_epoch, one))
    bundle = json.loads(found["texts"]["proof_bundle.json"])
    assert [e["global_root"] for e in bundle["epochs"]] == [root.hex() for root in found_global]
    assert _tree(found_global).hex() == bundle["run_root"] == found["run_root"]


@pytest.mark.parametrize("altered", [False, True])
def test_the_standalone_verifier_takes_the_whole_run_and_no_altered_one(tmp_path: Path, altered: bool) -> None:
    found = _of("bundle")
    folder = _written(tmp_path / "package", found)
    if altered:
        path = folder / "full" / sorted(found["leaves"])[1]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    script = ROOT / "uvcc_engine" / "transcript" / "proof" / "standalone_verify.py"
    command = [sys.executable, "-I", str(script), str(folder), "--allowed-signers", str(tmp_path / "keys")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == (1 if altered else found["exit_code"]), done.stdout + done.stderr


SPECIFICATIONS: Final = sorted(p for p in VECTORS.parent.glob("*.md") if p.name != "index.md")


@pytest.mark.parametrize("page", SPECIFICATIONS, ids=lambda p: p.stem)
def test_a_specification_names_version_form_limits_and_vectors(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.search(r"\bversion (v?\d|of|\d)", text, re.IGNORECASE)
    assert re.search(r"\*?[Cc]anonical\b", text)
    assert re.search(r"^#* ?Limits|^Limits|\*\*Limits\*\*", text, re.MULTILINE)
    named = set(re.findall(r"`vectors/([\w-]+\.json)`", text))
    assert named
    assert [n for n in named if not (VECTORS / n).is_file()] == []


def test_every_file_of_vectors_is_named_by_a_specification() -> None:
    told = {n for p in SPECIFICATIONS for n in re.findall(r"`vectors/([\w-]+\.json)`", p.read_text(encoding="utf-8"))}
    assert told == {p.name for p in VECTORS.glob("*.json")}
