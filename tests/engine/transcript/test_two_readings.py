"""Both verifiers call the same damaged signatures unreadable: what one reads as a wrong key the other must as well."""

from __future__ import annotations

from pathlib import Path

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.transcript.proof import manifest, standalone_verify
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import Identity


def damaged(armored: str) -> list[str]:
    """Any group of base64 characters dropped, one bit of any character turned, and the text cut anywhere."""
    drops = [armored[:at] + armored[at + n :] for n in (1, 8, 52) for at in range(len(armored))]
    turned = [armored[:at] + chr(ord(armored[at]) ^ 1) + armored[at + 1 :] for at in range(len(armored))]
    return [*drops, *turned, *(armored[:at] for at in range(len(armored)))]


def unreadable_to_us(armored: str) -> bool:
    try:
        sshsig.signer(armored)
    except UnreadableError:
        return True
    return False


def unreadable_to_the_other(root: Path, armored: str) -> bool:
    (root / f"{manifest.NAME}.sig").write_text(armored)
    files = {name: root / name for name in (manifest.NAME, f"{manifest.NAME}.sig")}
    try:
        standalone_verify.check_manifest(root, None, {}, files)
    except standalone_verify.Unreadable as error:
        return "is no signature" in str(error)
    except standalone_verify.Wrong:
        return False
    raise AssertionError("a damaged signature was accepted")


def test_a_damaged_signature_is_unreadable_to_both_or_to_neither(tmp_path: Path) -> None:
    (tmp_path / manifest.NAME).write_text("{}")
    armored = Identity(b"\x07" * 32, b"\x08" * 32).sign(sshsig.MANIFEST_NAMESPACE, b"other text")
    text = armored if isinstance(armored, str) else armored.decode()
    found = {(unreadable_to_us(t), unreadable_to_the_other(tmp_path, t)) for t in damaged(text)}
    assert found == {(True, True), (False, False)}
