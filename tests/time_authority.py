"""A time-stamping service on loopback: OpenSSL's, behind a few lines of HTTP."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_CONFIG = """
[tsa1]
serial = {0}/serial
signer_cert = {0}/tsa.pem
signer_key = {0}/tsa.key
signer_digest = sha256
default_policy = 1.2.3.4.1
digests = sha256
ess_cert_id_chain = no
[root]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign
[stamping]
extendedKeyUsage = critical,timeStamping
keyUsage = critical,digitalSignature
[req]
distinguished_name = dn
[dn]
"""
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass
class Authority:
    """``certificate``: what a reader trusts. ``answer``: what is sent in place of a stamp, if anything."""

    folder: Path
    url: str
    certificate: Path
    answer: bytes | None = None
    status: int = 200
    asked: list[bytes] = field(default_factory=list)

    def reply(self, query: bytes) -> bytes:
        self.asked.append(query)
        if self.answer is not None:
            return self.answer
        (self.folder / "q").write_bytes(query)
        words = ["-reply", "-queryfile", "q", "-out", "r", "-config", "conf", "-section", "tsa1"]
        _openssl(self.folder, "ts", *words)
        return (self.folder / "r").read_bytes()


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=500)


@contextmanager
def authority(folder: Path) -> Iterator[Authority]:
    """The service, with a root and a key of its own, until the block ends."""
    folder.mkdir(parents=True)
    (folder / "conf").write_text(_CONFIG.format(folder))
    (folder / "serial").write_text("01\n")
    root = ("-keyout", "root.key", "-out", "root.pem", "-subj", "/CN=root", "-config", "conf", "-extensions", "root")
    _openssl(folder, "req", "-x509", *_KEY, *root)
    _openssl(folder, "req", *_KEY, "-keyout", "tsa.key", "-out", "csr", "-subj", "/CN=tsa", "-config", "conf")
    by = ("-CA", "root.pem", "-CAkey", "root.key", "-CAcreateserial", "-extfile", "conf", "-extensions", "stamping")
    _openssl(folder, "x509", "-req", "-in", "csr", "-out", "tsa.pem", *by)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = made.reply(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(made.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Authority(folder, f"http://127.0.0.1:{server.server_port}/tsr", folder / "root.pem")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
