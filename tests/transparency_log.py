"""A transparency log on loopback with Rekor's interface: HTTP, a Merkle tree, ECDSA signatures; and it can lie."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric import ec

Reply = tuple[int, bytes, dict[str, str]]


def head(leaves: list[bytes]) -> bytes:
    """RFC 9162, section 2.1.1, as it stands there."""
    if len(leaves) < 2:
        return leaves[0] if leaves else hashlib.sha256().digest()
    k = cut(len(leaves))
    return hashlib.sha256(b"\x01" + head(leaves[:k]) + head(leaves[k:])).digest()


def cut(n: int) -> int:
    return 1 << ((n - 1).bit_length() - 1)


def path_of(m: int, leaves: list[bytes]) -> list[bytes]:
    """Section 2.1.3.1."""
    if len(leaves) == 1:
        return []
    k = cut(len(leaves))
    if m < k:
        return [*path_of(m, leaves[:k]), head(leaves[k:])]
    return [*path_of(m - k, leaves[k:]), head(leaves[:k])]


def growth(m: int, leaves: list[bytes], whole: bool = True) -> list[bytes]:
    """Section 2.1.4.1."""
    if m == len(leaves):
        return [] if whole else [head(leaves)]
    k = cut(len(leaves))
    if m <= k:
        return [*growth(m, leaves[:k], whole), head(leaves[k:])]
    return [*growth(m - k, leaves[k:], False), head(leaves[:k])]


@dataclass
class Log:
    """``pem``: the file with its public key. ``lie``: how it cheats, "" not at all. ``asked``: bodies it was sent."""

    folder: Path
    url: str = ""
    origin: str = "log.example - 2605736670972794746"
    lie: str = ""
    skew_s: float = 0.0
    bodies: list[bytes] = field(default_factory=lambda: [b"somebody else's"])
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.pem = self.folder / "log.pub"
        public = self.key.public_key()
        pem = public.public_bytes(ser.Encoding.PEM, ser.PublicFormat.SubjectPublicKeyInfo)
        self.pem.write_bytes(pem)
        der = public.public_bytes(ser.Encoding.DER, ser.PublicFormat.SubjectPublicKeyInfo)
        self.id = hashlib.sha256(der).hexdigest()

    def signed(self, data: bytes) -> bytes:
        return self.key.sign(data, ec.ECDSA(hashes.SHA256()))

    def leaves(self) -> list[bytes]:
        return [hashlib.sha256(b"\0" + b).digest() for b in self.bodies]

    def checkpoint(self, root: bytes, size: int) -> str:
        text = f"{self.origin}\n{size}\n{base64.b64encode(root).decode()}\nTimestamp: 1\n"
        signature = base64.b64encode(bytes.fromhex(self.id[:8]) + self.signed(text.encode())).decode()
        return f"{text}\n\u2014 log.example {signature}\n"

    def add(self, proposed: dict[str, Any]) -> Reply:
        """Take an entry up as Rekor does: check the signature, keep the hash, forget the content."""
        spec = proposed["spec"]
        content = base64.b64decode(spec["data"]["content"])
        armored = base64.b64decode(spec["signature"]["content"]).decode()
        public = base64.b64decode(spec["signature"]["publicKey"]["content"]).decode()
        (self.folder / "signers").write_text(f"somebody {public}")
        (self.folder / "signature").write_text(armored)
        words = ["-Y", "verify", "-f", "signers", "-I", "somebody", "-n", "file", "-s", "signature"]
        done = subprocess.run(["ssh-keygen", *words], cwd=self.folder, input=content, capture_output=True, check=False)
        if done.returncode or (proposed["kind"], spec["signature"]["format"]) != ("rekord", "ssh"):
            return 400, b'{"code":400,"message":"verifying signature"}', {}
        kept = {
            "data": {"hash": {"algorithm": "sha256", "value": hashlib.sha256(content).hexdigest()}},
            "signature": {**spec["signature"], "content": base64.b64encode(as_go_spells(armored).encode()).decode()},
        }
        body = json.dumps({"apiVersion": "0.0.1", "kind": "rekord", "spec": kept}, separators=(",", ":")).encode()
        uuid = hashlib.sha256(b"\0" + body).hexdigest()
        if uuid in self.entries:
            return 409, b"{}", {"Location": f"/api/v1/log/entries/{uuid}"}
        if self.lie == "equivocates":  # the tree that it shows from now on has another past
            self.bodies[1:] = [b"what somebody paid for", *self.bodies[2:]]
        index = len(self.bodies)
        self.bodies.append(b"nothing" if self.lie == "drops" else body)
        self.entries[uuid] = self.entry(body, index)
        if self.lie == "forgets":
            self.bodies.pop()
        if self.lie == "loses the answer":
            return 503, b"", {}
        return 201, json.dumps({uuid: self.entries[uuid]}).encode(), {}

    def entry(self, body: bytes, index: int) -> dict[str, Any]:
        leaves = self.leaves()
        signed = {
            "body": base64.b64encode(body).decode(),
            "integratedTime": int(time.time() + self.skew_s),
            "logID": self.id,
            "logIndex": index + 1_000,  # of all shards
        }
        data = json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()
        proof = {
            "checkpoint": self.checkpoint(head(leaves), len(leaves)),
            "hashes": [h.hex() for h in path_of(index, leaves)],
            "logIndex": index,
            "rootHash": head(leaves).hex(),
            "treeSize": len(leaves),
        }
        stamp = self.signed(b"another time" if self.lie == "signs no time" else data)
        if self.lie == "signs no head":
            proof["checkpoint"] = proof["checkpoint"][:-8] + "AAAAAA==\n"[-8:]
        checks = {"inclusionProof": proof, "signedEntryTimestamp": base64.b64encode(stamp).decode()}
        return {**signed, "verification": checks, "attestation": {}}

    def get(self, address: str) -> Reply:
        at, query = urlsplit(address).path, parse_qs(urlsplit(address).query)
        if at == "/api/v1/log/publicKey":
            return 200, self.pem.read_bytes(), {}
        if at == "/api/v1/log/proof":
            assert query["treeID"] == ["2605736670972794746"]
            first, last = int(query["firstSize"][0]), int(query["lastSize"][0])
            leaves = self.leaves()[:last]
            found = {"rootHash": head(leaves).hex(), "hashes": [h.hex() for h in growth(first, leaves)]}
            return 200, json.dumps(found).encode(), {}
        uuid = at.rpartition("/")[2]
        return 200, json.dumps({uuid: self.entries[uuid]}).encode(), {}


def as_go_spells(armored: str) -> str:
    """The same signature in lines of 64 characters."""
    text = "".join(armored.splitlines()[1:-1])
    lines = "\n".join(re.findall(".{1,64}", text))
    return f"-----BEGIN SSH SIGNATURE-----\n{lines}\n-----END SSH SIGNATURE-----\n"


GARBAGE = {
    "garbage": b"<html>no log</html>",
    "nothing": b"",
    "too much": bytes(1 << 20),
    "two entries": b'{"a":{},"b":{}}',
    "half an entry": b'{"a":{"body":"","integratedTime":1,"logID":"","logIndex":0}}',
}


@contextmanager
def transparency_log(folder: Path) -> Iterator[Log]:
    """The log, with a key of its own, until the block ends."""
    folder.mkdir(parents=True)
    log, over = Log(folder), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            log.asked.append(body)
            if log.lie == "never answers":
                over.wait(30)
                return
            if log.lie in GARBAGE:
                return self.reply(201, GARBAGE[log.lie], {})
            self.reply(*log.add(json.loads(body)))

        def do_GET(self) -> None:
            self.reply(*log.get(self.path))

        def reply(self, status: int, body: bytes, more: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**more, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    log.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield log
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()
