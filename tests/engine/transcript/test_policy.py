"""The policy: canonical, strict, signed by all three."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import (
    Policy,
    check_policy,
    check_signatures,
    read_signatures,
    sign_policy,
    write_signatures,
)

CODE = "c0" * 32


def test_round_trip_and_ids(policy: Policy) -> None:
    again = Policy.from_bytes(policy.canonical)
    assert again == policy
    assert again.hash == hashlib.sha256(policy.canonical).digest()
    assert again.sid_job == hashlib.sha256(b"UVCC_SID_JOB_V1" + again.hash).digest()
    assert json.loads(policy.canonical)["job"]["lr"] == 0.1
    assert policy.reveals("loss")
    assert policy.reveals("weights", "clinic")
    assert not policy.reveals("weights")
    assert policy.seeded == (0, 1, 2)


def test_fresh_nonce_makes_another_job(make_policy: Callable[..., Policy]) -> None:
    assert make_policy().sid_job == make_policy().sid_job
    assert make_policy(nonce="").sid_job != make_policy(nonce="").sid_job


def test_other_spellings_are_refused(policy: Policy) -> None:
    data = policy.to_json()
    for text in (
        json.dumps(data).encode(),
        policy.canonical.replace(b'"version":3', b'"version":3.0'),
        policy.canonical.replace(b'"version":3', b'"version":3,"version":3'),
        policy.canonical + b"\n\n",
        b"",
        b"[" * 100_000,
    ):
        with pytest.raises(UnreadableError):
            Policy.from_bytes(text)
    assert Policy.from_bytes(policy.canonical + b"\n") == policy


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        *way, last = path.split(".")
        for step in way:
            data = data[int(step)] if step.isdigit() else data[step]
        if isinstance(data, list):
            data[int(last)] = value
        else:
            data[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("version", 2, "version"),
        ("version", True, "version"),
        ("extra", 1, "extra"),
        ("revael", [], "reveal"),
        ("job", [], "job"),
        ("job.steps", 0, "steps"),
        ("job.steps", True, "steps"),
        ("job.kind", "", "kind"),
        ("job.big", 2**60, "canonical"),
        ("model_hash", "AB" * 32, "model_hash"),
        ("code_hash", "ab", "code_hash"),
        ("topology.replicas", 0, "replicas"),
        ("topology.replicas", "1", "replicas"),
        ("topology.depth", 1, "depth"),
        ("operation.operators", "three", "operation"),
        ("operation.party_traffic", "encrypted", "operation"),
        ("operation.party_traffic", "clear", "operation"),
        ("operation.extra", 1, "operation"),
        ("operation", None, "operation"),
        ("parties.1.party", 2, "party"),
        ("parties.1.provider", "", "provider"),
        ("parties.1.seeded", 0, "seeded"),
        ("parties.1.x25519", "zz", "X25519"),
        ("parties.1", 5, "parties"),
        ("inputs.commitments", ["01" * 32], "commitments"),
        ("inputs.commitments.0", "x", "commitments"),
        ("inputs.owner", 3, "owner"),
        ("reveal", ["loss"], "reveal"),
        ("reveal", [{"value": "a", "to": "all"}] * 2, "twice"),
        ("limits", {"a": []}, "limits"),
        ("nonce", "short", "nonce"),
    ],
)
def test_strict_fields(policy: Policy, path: str, value: Any, named: str) -> None:
    data = policy.to_json()
    data = json.loads(json.dumps(data))
    _set(path, value)(data)
    with pytest.raises(ConfigError, match=named):
        Policy.from_json(data)


@pytest.mark.parametrize(
    "field", ["version", "job", "topology", "operation", "parties", "inputs", "reveal", "limits", "nonce"]
)
def test_missing_fields(policy: Policy, field: str) -> None:
    data = policy.to_json()
    del data[field]
    with pytest.raises(ConfigError, match=field):
        Policy.from_json(data)


def test_a_policy_says_who_operates_the_run(make_policy: Callable[..., Policy]) -> None:
    alone, many = make_policy(topology=Topology()), make_policy(topology=Topology(replicas=2))
    assert alone.to_json()["operation"] == {"operators": "one", "party_traffic": "none"}
    assert many.to_json()["operation"] == {"operators": "one", "party_traffic": "sealed"}
    assert ["could look" in line for line in alone.operation.sentences()] == [True]
    assert "own pods is encrypted" in many.operation.sentences()[1]


@pytest.mark.parametrize("key", ["ed25519", "x25519"])
def test_two_parties_cannot_share_a_key(policy: Policy, key: str) -> None:
    data = policy.to_json()
    data["parties"][2][key] = data["parties"][0][key]
    with pytest.raises(ConfigError, match="same"):
        Policy.from_json(data)


def test_only_named_identities_and_code_sign(policy: Policy, identities: list[Identity], tmp_path: Path) -> None:
    stranger = Identity.create(tmp_path / "stranger")
    with pytest.raises(ConfigError, match="does not name"):
        sign_policy(stranger, policy, CODE)
    with pytest.raises(ConfigError, match="code"):
        sign_policy(identities[0], policy, "00" * 32)


def test_worker_refuses_a_policy_that_is_not_its_own(
    policy: Policy, identities: list[Identity], signatures: dict[int, str], make_policy: Any, tmp_path: Path
) -> None:
    assert [check_policy(policy, signatures, i, CODE) for i in identities] == [0, 1, 2]
    with pytest.raises(ConfigError):
        check_policy(policy, signatures, Identity.create(tmp_path / "x"), CODE)
    with pytest.raises(ConfigError):
        check_policy(policy, signatures, identities[0], "11" * 32)
    with pytest.raises(VerificationError, match="P0"):
        check_policy(make_policy(owner="other"), signatures, identities[0], CODE)
    with pytest.raises(VerificationError, match="P1"):
        check_signatures(policy, {**signatures, 1: signatures[2]})
    with pytest.raises(VerificationError):
        check_signatures(policy, {0: signatures[0], 1: signatures[1]})


def test_signature_file(policy: Policy, signatures: dict[int, str], tmp_path: Path) -> None:
    write_signatures(tmp_path / "s.json", signatures)
    assert read_signatures(tmp_path / "s.json") == signatures
    (tmp_path / "s.json").write_text("[]")
    with pytest.raises(UnreadableError):
        read_signatures(tmp_path / "s.json")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_ssh_keygen_checks_the_policy_file(policy: Policy, signatures: dict[int, str], tmp_path: Path) -> None:
    allowed = tmp_path / "allowed_signers"
    sshsig.write_allowed_signers(allowed, {f"P{p.party}": p.public.ed25519 for p in policy.parties})
    (tmp_path / "p1.sig").write_text(signatures[1])
    words = ["ssh-keygen", "-Y", "verify", "-f", str(allowed), "-I", "P1", "-n", "uvcc-policy"]
    done = subprocess.run([*words, "-s", str(tmp_path / "p1.sig")], input=policy.canonical, capture_output=True)
    assert done.returncode == 0, done.stderr
