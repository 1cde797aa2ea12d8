"""Identities and their OpenSSH signatures, checked against ssh-keygen and asyncssh."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity, verify_signature
from uvcc_engine.transcript.signing.signers import read_allowed_signers

SID = bytes(range(32))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Identity, Identity]:
    return Identity.create(tmp_path / "a"), Identity.create(tmp_path / "b")


def test_load_gives_back_the_same_identity(tmp_path: Path) -> None:
    made = Identity.create(tmp_path / "id")
    loaded = Identity.load(tmp_path / "id")
    assert loaded.public == made.public
    assert loaded.sign("uvcc-root", b"x") == made.sign("uvcc-root", b"x")
    assert loaded.own_secret(SID, "blind") == made.own_secret(SID, "blind")
    assert not made.public.seeded


def test_private_files_are_private(tmp_path: Path) -> None:
    Identity.create(tmp_path / "id")
    for name in ("ed25519", "x25519"):
        assert (tmp_path / "id" / name).stat().st_mode & 0o777 == 0o600
    (tmp_path / "id" / "x25519").chmod(0o644)
    with pytest.raises(UnreadableError, match="readable by others"):
        Identity.load(tmp_path / "id")


def test_creation_never_overwrites(tmp_path: Path) -> None:
    Identity.create(tmp_path / "id")
    with pytest.raises(ConfigError, match="already holds"):
        Identity.create(tmp_path / "id")


def test_a_place_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is no folder"):
        Identity.create(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot keep an identity in .*: Not a directory"):
        Identity.create(tmp_path / "file" / "below")


def test_load_refuses_a_mixed_folder(tmp_path: Path) -> None:
    Identity.create(tmp_path / "a")
    Identity.create(tmp_path / "b")
    (tmp_path / "a" / "x25519").write_bytes((tmp_path / "b" / "x25519").read_bytes())
    with pytest.raises(UnreadableError, match="does not belong"):
        Identity.load(tmp_path / "a")
    with pytest.raises(UnreadableError):
        Identity.load(tmp_path / "nowhere")


def test_seeded_identity_is_repeatable_and_says_so(tmp_path: Path) -> None:
    one = Identity.create_seeded(tmp_path / "1", b"seed-0")
    two = Identity.create_seeded(tmp_path / "2", b"seed-0")
    other = Identity.create_seeded(tmp_path / "3", b"seed-1")
    assert one.public == two.public != other.public
    assert one.public.seeded
    assert Identity.load(tmp_path / "1").public.seeded


def test_pair_secret_is_shared_and_bound(pair: tuple[Identity, Identity], tmp_path: Path) -> None:
    a, b = pair
    c = Identity.create(tmp_path / "c")
    assert a.pair_secret(b.public, SID, "blind") == b.pair_secret(a.public, SID, "blind")
    secrets = {
        a.pair_secret(b.public, SID, "blind"),
        a.pair_secret(b.public, SID, "mask"),
        a.pair_secret(b.public, bytes(32), "blind"),
        a.pair_secret(c.public, SID, "blind"),
        a.own_secret(SID, "blind"),
    }
    assert len(secrets) == 5


def test_small_order_key_is_refused(pair: tuple[Identity, Identity]) -> None:
    bad = PublicIdentity(pair[1].public.ed25519, "00" * 32)
    with pytest.raises(ProtocolError):
        pair[0].pair_secret(bad, SID, "blind")


@pytest.mark.parametrize("change", [{"extra": 1}, {"x25519": "zz" * 32}, {"ed25519": "ssh-rsa AAAA"}, {"seeded": 1}])
def test_public_identity_is_read_strictly(pair: tuple[Identity, Identity], change: dict[str, object]) -> None:
    good = pair[0].public.to_json()
    assert PublicIdentity.from_json(good) == pair[0].public
    with pytest.raises(UnreadableError):
        PublicIdentity.from_json({**good, **change})


def test_signature_binds_key_namespace_and_payload(pair: tuple[Identity, Identity]) -> None:
    a, b = pair
    text = a.sign("uvcc-root", b"payload")
    assert verify_signature(a.public, "uvcc-root", b"payload", text)
    assert not verify_signature(b.public, "uvcc-root", b"payload", text)
    assert not verify_signature(a.public, "uvcc-result", b"payload", text)
    assert not verify_signature(a.public, "uvcc-root", b"payloae", text)


def test_every_byte_of_a_signature_matters(pair: tuple[Identity, Identity]) -> None:
    text = pair[0].sign("uvcc-root", b"payload")
    for at in range(len(text)):
        for flipped in (chr(ord(text[at]) ^ 1), "", text[at] * 2):
            changed = text[:at] + flipped + text[at + 1 :]
            if changed != text:
                assert not verify_signature(pair[0].public, "uvcc-root", b"payload", changed), (at, flipped)


def test_reserved_field_is_not_a_hiding_place(pair: tuple[Identity, Identity]) -> None:
    """A filled reserved field would pass ssh-keygen's and asyncssh's check; here it does not."""
    text = pair[0].sign("uvcc-root", b"payload")
    blob = base64.b64decode("".join(text.splitlines()[1:-1]))
    at = blob.index(b"uvcc-root") + len(b"uvcc-root")
    stuffed = blob[:at] + b"\x00\x00\x00\x03abc" + blob[at + 4 :]
    assert not verify_signature(pair[0].public, "uvcc-root", b"payload", sshsig.armor_text(stuffed))


def test_asyncssh_accepts(pair: tuple[Identity, Identity], tmp_path: Path) -> None:
    import asyncssh

    sshsig.write_allowed_signers(tmp_path / "allowed", {"P0": pair[0].public.ed25519})
    text = pair[0].sign("uvcc-root", b"payload").encode()
    assert asyncssh.validate_sshsig(b"payload", text, "P0", str(tmp_path / "allowed"))
    assert not asyncssh.validate_sshsig(b"other", text, "P0", str(tmp_path / "allowed"))


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_ssh_keygen_accepts_and_signs_alike(pair: tuple[Identity, Identity], tmp_path: Path) -> None:
    a, b = pair
    allowed = tmp_path / "allowed"
    sshsig.write_allowed_signers(allowed, {"P0": a.public.ed25519, "P1": b.public.ed25519})
    (tmp_path / "s.sig").write_text(a.sign("uvcc-root", b"payload"))
    check = ["ssh-keygen", "-Y", "verify", "-f", str(allowed), "-n", "uvcc-root", "-s", str(tmp_path / "s.sig")]
    assert subprocess.run([*check, "-I", "P0"], input=b"payload", capture_output=True).returncode == 0
    assert subprocess.run([*check, "-I", "P1"], input=b"payload", capture_output=True).returncode != 0
    assert subprocess.run([*check, "-I", "P0"], input=b"other", capture_output=True).returncode != 0
    (tmp_path / "m").write_bytes(b"payload")
    key = str(tmp_path / "a" / "ed25519")
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", "uvcc-root", str(tmp_path / "m")], check=True)
    assert (tmp_path / "m.sig").read_text() == a.sign("uvcc-root", b"payload")


def test_allowed_signers_round_trip(pair: tuple[Identity, Identity], tmp_path: Path) -> None:
    signers = {"P0": pair[0].public.ed25519, "P1": pair[1].public.ed25519}
    sshsig.write_allowed_signers(tmp_path / "allowed", signers)
    found = read_allowed_signers(tmp_path / "allowed")
    assert [found.refusal(who, key, sshsig.NAMESPACES) for who, key in signers.items()] == ["", ""]
    assert "do not name collector" in found.refusal(sshsig.COLLECTOR, signers["P0"], (sshsig.MANIFEST_NAMESPACE,))
    sshsig.write_allowed_signers(tmp_path / "allowed", {"P0": signers["P0"]}, signers["P1"])
    found = read_allowed_signers(tmp_path / "allowed")
    assert found.refusal(sshsig.COLLECTOR, signers["P1"], (sshsig.MANIFEST_NAMESPACE,)) == ""
    assert "does not permit" in found.refusal(sshsig.COLLECTOR, signers["P1"], (sshsig.ROOT_NAMESPACE,))
    assert "does not permit" in found.refusal("P0", signers["P0"], (sshsig.MANIFEST_NAMESPACE,))
    (tmp_path / "allowed").write_text("# people\nP0 not-a-key\n")
    with pytest.raises(UnreadableError, match="allowed:2"):
        read_allowed_signers(tmp_path / "allowed")
