"""Both verifiers call the same damaged signatures unreadable: what one reads as a wrong key the other must as well."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.private_job import MAY_LACK, METRICS, REVEALABLE, VALIDATIONS
from uvcc_engine.transcript.proof import manifest, standalone_verify
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy


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


NO_POLICY: list[tuple[str, dict[str, Any]]] = [
    *(("job", {"kind": kind}) for kind in (None, "", 0, True, 0.5, ["private"], {"private": 1})),
    *(("job", {"steps": steps}) for steps in (None, 0, True, 1.0, "3")),
    *(("limits", {"total": limit}) for limit in (None, [], [1], {"a": 1})),
    *(("topology", {"replicas": size}) for size in (0, True, 1.0, "1", 65_537)),
]


@pytest.mark.parametrize(("part", "change"), NO_POLICY)
def test_what_is_no_policy_is_none_to_both(
    part: str, change: dict[str, Any], make_policy: Callable[..., Policy]
) -> None:
    found = make_policy().to_json()
    standalone_verify.Policy(found)
    found[part] = {**found[part], **change}
    with pytest.raises(ConfigError):
        Policy.from_json(found)
    with pytest.raises(standalone_verify.Unreadable):
        standalone_verify.Policy(found)


@pytest.mark.parametrize("limit", [0, 1.5, "1h", True])
def test_limits_may_be_numbers_and_texts_to_both(limit: Any, make_policy: Callable[..., Policy]) -> None:
    found = make_policy().to_json()
    found["limits"] = {"total": limit}
    assert Policy.from_json(found).hash == standalone_verify.Policy(found).hash
