"""The vectors of signed statements and of a session, read by a few lines that share no code with ours, and by ours."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib
import json
import re
import struct
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from uvcc_engine.plane import acks
from uvcc_engine.transcript.signed import approvals, barriers, consents, owner_shares, reports, roster
from uvcc_engine.transcript.signed.proposals import SignedProposal, Standing, standings

ROOT: Final = Path(__file__).parents[1]
SPECIFICATIONS: Final = ROOT / "docs" / "specifications"
NAMESPACES: Final = {"owner-key": "uvcc-owner", "owner-share": "uvcc-owner"}


def _of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SPECIFICATIONS / "vectors" / f"{name}.json").read_text(encoding="utf-8"))
    return found


# ---- a reader from the page alone


def canon(value: Any) -> str:
    """RFC 8785, for what occurs in these texts."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return "{" + ",".join(f"{json.dumps(k, ensure_ascii=False)}:{canon(value[k])}" for k in keys) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canon, value)) + "]"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)


def sha(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def ssh_string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def signed_by(key: str, namespace: str, text: bytes, armored: str) -> bool:
    """PROTOCOL.sshsig, Ed25519, SHA-512, nothing reserved."""
    blob = base64.b64decode("".join(armored.splitlines()[1:-1]))
    wire = base64.b64decode(key.split()[1])
    inner = ssh_string(b"ssh-ed25519") + ssh_string(blob[-64:])
    ns, rest = ssh_string(namespace.encode()), ssh_string(b"") + ssh_string(b"sha512")
    if blob != b"SSHSIG" + struct.pack(">I", 1) + ssh_string(wire) + ns + rest + ssh_string(inner):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(wire[-32:]).verify(
            blob[-64:], b"SSHSIG" + ns + rest + ssh_string(hashlib.sha512(text).digest())
        )
    except InvalidSignature:
        return False
    return True


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def opened(record: str, kind: str, key: str) -> dict[str, Any] | None:
    """A record of this type by this key, or None."""
    try:
        found = json.loads(record, object_pairs_hook=once)
    except ValueError:
        return None
    if set(found) != {"content", "signature"} or found["content"].get("type") != kind:
        return None
    text = canon(found["content"]).encode()
    if not signed_by(key, NAMESPACES.get(kind, f"uvcc-{kind}"), text, found["signature"]):
        return None
    content = {k: v for k, v in found["content"].items() if k != "type"}
    return content if set(content) <= listed_fields(kind) and content.get("version", 1) == 1 else None


def tables() -> dict[str, set[str]]:
    """Every table of fields on the page, by the class that it is marked with."""
    text = (SPECIFICATIONS / "statements.md").read_text(encoding="utf-8")
    found = {}
    for path, table in re.findall(r"^<!-- fields: ([\w.]+) -->\n((?:\|.*\n)+)", text, re.MULTILINE):
        cells = [row.split("|")[1] for row in table.splitlines()[2:]]
        found[path] = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    return found


def listed_fields(kind: str) -> set[str]:
    if kind in ("proposal", "owner-key"):
        return {"proposal", "ed25519", "x25519", "seeded"}
    by_name = {path.rpartition(".")[2]: names for path, names in tables().items()}
    words = {"approval": "Approval", "roster": "Roster", "barrier": "Barrier", "report": "DomainReport"}
    words |= {"consent": "SignedConsent"}
    return by_name[{**words, "owner-share": "OwnerShare"}[kind]]


@pytest.mark.parametrize("path", tables())
def test_a_table_of_fields_is_that_of_the_code(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert tables()[path] == {f.name for f in fields(getattr(importlib.import_module(module), name))}


def contents(kind: str) -> list[dict[str, Any]]:
    """All records of one type, each opened with the key of its signer."""
    found = _of("statements")
    keys = {name: k["ed25519"] for name, k in found["keys"].items()}
    domains = [keys[n] for n in ("alpha", "beta", "gamma")]
    made = []
    for record in found["records"][kind]:
        said = json.loads(record)["content"]
        key = said["ed25519"] if kind == "owner-key" else domains[said["party"]] if "party" in said else ""
        key = key or {"proposal": keys["alpha"], "owner-share": keys["north"]}[kind]
        content = opened(record, kind, key)
        assert content is not None, record
        made.append(content)
    return made


def test_a_reader_of_the_page_opens_every_record_and_none_that_must_be_refused() -> None:
    found = _of("statements")
    assert {kind: len(contents(kind)) for kind in found["records"]} == {
        kind: len(records) for kind, records in found["records"].items()
    }
    beta = found["keys"]["beta"]["ed25519"]
    assert [r["why"] for r in found["refused_as_rosters_of_beta"] if opened(r["record"], "roster", beta)] == []
    assert len(found["refused_as_rosters_of_beta"]) == 8


def test_ids_digests_and_marks_follow_from_the_page() -> None:
    found = _of("statements")
    (proposal,) = (c["proposal"] for c in contents("proposal"))
    assert canon(proposal) == found["proposal"]["canonical"]
    assert sha(canon(proposal)) == found["proposal"]["id"]
    rosters = contents("roster")
    assert [sha(canon(r)) for r in rosters] == found["rosters"]
    said = contents("barrier")
    marks = [sha("UVCC_BARRIER_V1" + canon(b)) for b in said]
    assert marks == found["marks"]
    assert [b["seen"] for b in said] == [{}] * 3 + [dict(zip("012", marks, strict=False))] * 3 + [
        dict(zip("012", marks[3:], strict=False))
    ]
    listed = {str(n): digest for n, digest in enumerate(found["rosters"])}
    assert said[3]["digest"] == sha(canon(listed))
    parts, owners = found["owners"]["parts"], found["owners"]
    assert owners["commitments"] == [
        sha("UVCC_INPUT_SET_V1" + canon([[p["owner"], p["commitments"][c]] for p in parts])) for c in range(3)
    ]
    head = canon([{**p, "bytes": size} for p, size in zip(parts, (900, 800), strict=True)]).encode()
    assert bytes.fromhex(owners["head of sizes 900, 800"]) == b"UVCCSET1" + struct.pack("<I", len(head)) + head
    assert contents("owner-share")[0]["rosters"] == found["rosters"]


def test_a_message_of_a_file_follows_from_the_page() -> None:
    p = _of("statements")["parcel"]
    told = f"{p['proposal']}|{p['attempt']}|{p['purpose']}"
    box = int.from_bytes(hashlib.sha256(b"UVCC_PARCEL_V1" + told.encode()).digest()[:7], "big")
    assert (p["sent"]["path"], p["sent"]["box"]) == ("/enqueue", box)
    (message,) = p["sent"]["messages"]
    line, _, piece = base64.b64decode(message["payload_b64"]).partition(b"\n")
    data = bytes.fromhex(p["file"])
    assert json.loads(line) == {"at": 0, "name": "sealed-p1.bin", "sha256": sha(data), "size": len(data)}
    assert piece == data
    assert message["msg_id"] == sha(f"{box}|0|sealed-p1.bin{sha(data)}")


def test_our_own_readers_take_the_same_records_and_refuse_the_same() -> None:
    found = _of("statements")
    records, beta = found["records"], found["keys"]["beta"]["ed25519"]
    standing, twice = standings([*records["proposal"], *records["approval"]])
    (one,) = standing.values()
    assert not twice
    assert one.signed.proposal.id == found["proposal"]["id"]
    assert not one.approved  # gamma refused after it had approved
    assert Standing(one.signed).hearing(records["approval"][0]).said[0][0].decision == approvals.APPROVE
    p = one.signed.proposal
    listed = roster.gathered(p, 0, records["roster"])
    assert [listed[n].digest for n in range(3)] == found["rosters"]
    reached = barriers.gathered(p, 0, records["barrier"])
    barriers.in_order(reached, barriers.stages_of(["full"]))
    assert (set(reached.stopped), reached.stopped[1].reason) == ({1}, "no shares")
    assert reports.newest(p, records["report"])[1].number == 7
    assert consents.gathered(p, 0, records["consent"]) == {"full": {0}, "resume-1": {2}}
    assert consents.gathered(p, 1, records["consent"]) == {}
    assert owner_shares.keys_of(p.owners, records["owner-key"]).keys() == {0, 1}
    assert owner_shares.gathered(p, 0, listed, records["owner-share"]).keys() == {0}
    for liar in found["refused_as_rosters_of_beta"]:
        assert roster.opened(liar["record"], beta) is None, liar["why"]
    assert SignedProposal.opened(records["roster"][0]) is None


def test_ssh_keygen_alone_checks_a_record(tmp_path: Path) -> None:
    found = _of("statements")
    record = json.loads(found["records"]["roster"][1])
    (tmp_path / "allowed").write_text(f"beta {found['keys']['beta']['ed25519']}\n")
    (tmp_path / "sig").write_text(record["signature"])
    for text, code in ((canon(record["content"]), 0), (canon(record["content"] | {"region": "there"}), 255)):
        command = ["ssh-keygen", "-Y", "verify", "-f", "allowed", "-I", "beta", "-n", "uvcc-roster", "-s", "sig"]
        done = subprocess.run(command, input=text, text=True, cwd=tmp_path, capture_output=True, check=False)
        assert done.returncode == code, done.stderr


# ---- the session


def expand(secret: bytes, info: str, length: int = 32) -> bytes:
    return HKDFExpand(hashes.SHA256(), length, b"UVCC_PLANE_V1 " + info.encode()).derive(secret)


class Session:
    """The keys of the session of the vectors, from the page."""

    def __init__(self, found: dict[str, Any]) -> None:
        parties, self.sub = found["parties"], bytes.fromhex(found["sid_sub"])
        self.hello = [bytes.fromhex(found[n])[48:] for n in ("hello_low", "hello_high")]
        self.publics = [bytes.fromhex(p["x25519"]) for p in parties]
        static = self._agree(parties[0]["secrets"]["x25519"], self.publics[1])
        fresh = self._agree(parties[0]["secrets"]["fresh x25519"], self.fresh(1))
        assert static == self._agree(parties[1]["secrets"]["x25519"], self.publics[0])
        self.mac = self.pair(static, "plane-hello")
        pins = [hashlib.sha256(f"{p['ed25519']}\n{p['x25519']}".encode()).digest() for p in parties]
        text = b"UVCC_PLANE_HELLO_V1" + self.sub + self.hello[0] + self.hello[1] + pins[0] + pins[1]
        self.transcript = hashlib.sha256(text).digest()
        self.secret = HKDF.extract(hashes.SHA256(), self.transcript, fresh + self.pair(static, "plane"))
        self.id = int.from_bytes(expand(self.secret, "id", 8), "little") or 1

    def fresh(self, party: int) -> bytes:
        return self.hello[party][28:60]

    @staticmethod
    def _agree(private: str, public: bytes) -> bytes:
        key = X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
        return key.exchange(X25519PublicKey.from_public_bytes(public))

    def pair(self, shared: bytes, label: str) -> bytes:
        info = b"UVCC_PAIR_V1" + struct.pack("<H", len(label)) + label.encode() + b"".join(sorted(self.publics))
        return HKDF(hashes.SHA256(), 32, self.sub, info).derive(shared)

    def key(self, info: str, generation: int = 0) -> AESGCM:
        secret = expand(self.secret, info)
        for _ in range(generation):
            secret = expand(secret, "next")
        return AESGCM(expand(secret, "key"))


def test_a_session_follows_from_the_page_from_its_first_byte() -> None:
    found = _of("session")
    s = Session(found)
    for party, kind in ((0, 1), (1, 2)):
        hello = s.hello[party]
        assert struct.unpack("<8sBBH", hello[:12]) == (b"UVCCHEL2", party, 1 - party, kind)
        assert hello[60:92] == (hashlib.sha256(s.hello[0]).digest() if party else bytes(32))
        assert hmac.digest(s.mac, hello[:92], "sha256") == hello[92:]
    assert s.id == found["session"]
    for party, name in enumerate(("low", "high")):
        raw = bytes.fromhex(found[f"auth_{name}"])
        assert struct.unpack_from("<4sBBBBQQIIQI", raw)[6] == s.id
        plain = AESGCM(expand(s.secret, f"auth {name}")).decrypt(bytes(12), raw[48:], raw[:44])
        (size,) = struct.unpack_from("<H", plain)
        signature, cursors = plain[2 : 2 + size].decode(), plain[2 + size :]
        text = b"UVCC_PLANE_AUTH_V1" + s.transcript + bytes([party]) + hashlib.sha256(cursors).digest()
        assert signed_by(found["parties"][party]["ed25519"], "uvcc-plane", text, signature)
        assert [struct.unpack("<IIQQ", cursors)] == [
            (c["stream"], 0, c["expected"], c["whole"]) for c in found["cursors"]["entries"]
        ]


def test_frames_of_both_generations_open_and_no_altered_one_does() -> None:
    found = _of("session")
    s = Session(found)
    for f in found["frames"].values():
        raw = bytes.fromhex(f["frame"])
        stream, generation, seq = struct.unpack_from("<IIQ", raw, 24)
        nonce = struct.pack("<IQ", stream, 2 * seq)
        plain = s.key("data low", generation).decrypt(nonce, raw[48:], raw[:44])
        assert plain.hex() == f["plain"]
        label, kind, zero, epoch, op, chunk, chunks, length, total = struct.unpack_from("<IHHIIIIQQ", plain)
        assert (kind, zero, epoch, op, chunk, chunks) == (2, 0, found["tag"]["epoch"], found["tag"]["op"], 0, 1)
        assert (length, plain[40 : 40 + length].hex()) == (total, found["payload"])
        assert len(plain) % 8 == 0
        assert not any(plain[40 + length :])
        packed = struct.pack("<QBBBBIII", epoch << 32 | stream, 0, 1, 0x21, kind, op, chunk, chunks)
        assert hashlib.sha256(b"uvcc.msgid.v1" + s.sub + packed).digest()[:4] == struct.pack("<I", label)
        for at in (4, 24, 28, 32, 48, len(raw) - 1):
            bad = bytearray(raw)
            bad[at] ^= 1
            with pytest.raises(InvalidTag):
                s.key("data low", generation).decrypt(nonce, bytes(bad[48:]), bytes(bad[:44]))


def test_an_acknowledgement_reads_back() -> None:
    a = _of("session")["acknowledgement"]
    plain = bytes.fromhex(a["plain"])
    assert struct.unpack_from("<HHI", plain) == (a["flags"], 1, 0)
    head = struct.unpack_from("<IIQQQQ", plain, 8)
    assert head == (a["stream"], len(a["ranges"]), a["expected"], a["limit"], a["numbered"], a["committed"])
    assert list(struct.unpack_from("<QQ", plain, 48)) == a["ranges"][0]
    assert len(plain) == 64
    flags, (entry,) = acks.decode(plain, 0)
    assert (flags, entry.numbered, entry.committed, list(map(list, entry.ack.ranges))) == (0, 2, 1, a["ranges"])
