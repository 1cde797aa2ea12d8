"""Both verifiers call the same damaged signatures unreadable: what one reads as a wrong key the other must as well."""

from __future__ import annotations

import re
from pathlib import Path

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.job.private_job import MAY_LACK, METRICS, REVEALABLE, VALIDATIONS
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


def test_both_know_the_same_values_that_a_step_may_reveal_and_the_same_that_it_may_leave_unsaid() -> None:
    shown, lacking = standalone_verify.SHOWN, standalone_verify.LACKING
    assert {name for name in REVEALABLE if shown.fullmatch(name)} == {"loss", *VALIDATIONS}
    assert {name for name in REVEALABLE if lacking.fullmatch(name)} == set(MAY_LACK)


def test_both_measure_in_the_last_epoch_where_any_metric_is_listed() -> None:
    text = (Path(standalone_verify.__file__).parent / "EVIDENCE.md").read_text()
    said = text.partition("`job.reveal` lists one of ")[2].partition(", it takes at")[0]
    assert set(re.findall(r"`(\w+)`", said)) | {"confusion"} == set(METRICS)
    validated = {name for name in METRICS if standalone_verify.SHOWN.fullmatch(f"val_{name}")}
    assert set(METRICS) - validated == {"confusion", "inertia"}
