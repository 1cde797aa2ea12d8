"""Signatures by an Ed25519 key in a FIDO token: OpenSSH's own, and ours by the format's rules that OpenSSH checks."""

from __future__ import annotations

import base64
import hashlib
import struct
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from uvcc_console.federation import domain_key
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.transcript.signed import approvals, orders
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import PublicIdentity

# by OpenSSH 9.2 with its software token (sk-dummy.so): ssh-keygen -Y sign -f k -n uvcc-approval over the bytes "hello"
KEY = (
    "sk-ssh-ed25519@openssh.com "
    "AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29tAAAAIHabVHRdG9i1CVt2CDtERFFZGvzDzhAxMM/EjWufnw9wAAAABHNzaDo="
)
SIGNATURE = """\
-----BEGIN SSH SIGNATURE-----
U1NIU0lHAAAAAQAAAEoAAAAac2stc3NoLWVkMjU1MTlAb3BlbnNzaC5jb20AAAAgdptUdF
0b2LUJW3YIO0REUVka/MPOEDEwz8SNa5+fD3AAAAAEc3NoOgAAAA11dmNjLWFwcHJvdmFs
AAAAAAAAAAZzaGE1MTIAAABnAAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29tAAAAQF
N10cOiRtYPfxxVzZWy9cfpF5wIS2qbTxiBrOuN+Dw/dGrolcmL860Sb8VrZ4GRZsZY+vfB
xtL/C8D1klAbjAcAEjRWeA==
-----END SSH SIGNATURE-----
"""


def string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


class Token:
    """A token in software, by PROTOCOL.u2f and PROTOCOL.sshsig alone."""

    kind = b"sk-ssh-ed25519@openssh.com"

    def __init__(self, application: bytes = b"ssh:") -> None:
        self.key, self.application, self.counter = Ed25519PrivateKey.generate(), application, 0
        wire = string(self.kind) + string(self.key.public_key().public_bytes_raw()) + string(application)
        self.wire, self.line = wire, f"{self.kind.decode()} {base64.b64encode(wire).decode()}"

    def sign(self, namespace: str, payload: bytes, flags: int = 1) -> str:
        self.counter += 1
        said = bytes([flags]) + struct.pack(">I", self.counter)
        names = string(namespace.encode()) + string(b"") + string(b"sha512")
        text = b"SSHSIG" + names + string(hashlib.sha512(payload).digest())
        raw = self.key.sign(hashlib.sha256(self.application).digest() + said + hashlib.sha256(text).digest())
        inner = string(self.kind) + string(raw) + said
        blob = b"SSHSIG" + struct.pack(">I", 1) + string(self.wire) + names + string(inner)
        return sshsig.armor_text(blob)


def openssh_accepts(tmp_path: Path, line: str, namespace: str, payload: bytes, armored: str) -> bool:
    (tmp_path / "allowed").write_text(f"who {line}\n")
    (tmp_path / "sig").write_text(armored)
    command = ["ssh-keygen", "-Y", "verify", "-f", "allowed", "-I", "who", "-n", namespace, "-s", "sig"]
    return subprocess.run(command, input=payload, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_a_signature_of_opensshs_token_holds_and_none_with_another_bit(tmp_path: Path) -> None:
    assert sshsig.holds(KEY, "uvcc-approval", b"hello", SIGNATURE)
    assert openssh_accepts(tmp_path, KEY, "uvcc-approval", b"hello", SIGNATURE)
    assert not sshsig.holds(KEY, "uvcc-approval", b"hallo", SIGNATURE)
    assert not sshsig.holds(KEY, "uvcc-barrier", b"hello", SIGNATURE)
    blob = base64.b64decode("".join(SIGNATURE.splitlines()[1:-1]))
    for at in range(len(blob)):
        bad = bytearray(blob)
        bad[at] ^= 1
        assert not sshsig.holds(KEY, "uvcc-approval", b"hello", sshsig.armor_text(bytes(bad))), at
    for cut in (blob[:-1], blob + b"\0", blob[:20]):
        assert not sshsig.holds(KEY, "uvcc-approval", b"hello", sshsig.armor_text(cut))
    for text in (SIGNATURE.replace("\n", "\n\n", 1), SIGNATURE[:-1], SIGNATURE.replace("Q", "q"), "", KEY):
        assert not sshsig.holds(KEY, "uvcc-approval", b"hello", text)


@pytest.mark.parametrize("application", [b"ssh:", b"ssh:uvcc-domain"])
def test_what_the_formats_rules_say_openssh_takes_and_so_does_this(tmp_path: Path, application: bytes) -> None:
    token, other = Token(application), Token(application)
    for flags in (0, 1, 5):  # without a touch, with one, and with a PIN
        signed = token.sign("uvcc-consent", b"text", flags)
        assert sshsig.holds(token.line, "uvcc-consent", b"text", signed)
        assert openssh_accepts(tmp_path, token.line, "uvcc-consent", b"text", signed)
        assert not sshsig.holds(other.line, "uvcc-consent", b"text", signed)
    elsewhere = Token(b"web:")
    elsewhere.key = token.key  # the same key for another application is another key
    assert not sshsig.holds(elsewhere.line, "uvcc-consent", b"text", token.sign("uvcc-consent", b"text"))
    plain = sshsig.public_line(token.key.public_key().public_bytes_raw())
    assert not sshsig.holds(plain, "uvcc-consent", b"text", token.sign("uvcc-consent", b"text"))


def test_a_domains_word_by_a_token_counts_and_a_pods_identity_is_none() -> None:
    token = Token()
    said = approvals.Approval(of="policy", sha256="ab" * 32, party=1, decision="approve")
    body = approvals.signed(said, lambda payload: token.sign(approvals.APPROVAL_NAMESPACE, payload))
    assert approvals.opened(body, token.line) == said
    approvals.check(body, token.line, of="policy", sha256="ab" * 32, party=1)
    with pytest.raises(ConfigError, match="is not signed by"):
        approvals.check(body, Token().line, of="policy", sha256="ab" * 32, party=1)
    assert orders.opened(body, "uvcc-order", [token.line]) is None
    with pytest.raises(UnreadableError, match="not an OpenSSH Ed25519 public key"):
        sshsig.public_raw(token.line)
    with pytest.raises((UnreadableError, ConfigError)):
        PublicIdentity(token.line, "ab" * 32)


def test_a_tokens_key_has_digits_of_its_own_and_one_spelling() -> None:
    token = Token()
    assert sshsig.person_material(token.line) == token.wire
    assert domain_key.fingerprint(token.line) != domain_key.fingerprint(
        sshsig.public_line(token.key.public_key().public_bytes_raw())
    )
    wire = base64.b64encode(token.wire[:-1]).decode()
    for line in (f"{token.line} comment", token.line[:-1], token.line.replace(" ", "  "), f"{KEY.split()[0]} {wire}"):
        with pytest.raises(UnreadableError, match="not an OpenSSH Ed25519 public key"):
            sshsig.person_material(line)
