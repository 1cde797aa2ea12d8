"""Three parties with real identities and keys, exchanging random payloads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty, sign_policy

CODE = "c0" * 32
PROVIDERS = (("north", "eu"), ("west", "us"), ("south", "ap"))


@pytest.fixture
def identities(tmp_path: Path) -> list[Identity]:
    return [Identity.create_seeded(tmp_path / "identity" / str(p), f"party {p}".encode()) for p in range(3)]


@pytest.fixture
def make_policy(identities: list[Identity]) -> Callable[..., Policy]:
    def make(**changed: object) -> Policy:
        parties = [PolicyParty(p, identities[p].public, *PROVIDERS[p]) for p in range(3)]
        fields: dict[str, object] = {
            "job": {"kind": "private", "steps": 3, "lr": 0.1},
            "model_hash": "ab" * 32,
            "code_hash": CODE,
            "topology": Topology(),
            "parties": parties,
            "owner": "clinic",
            "commitments": ["01" * 32, "02" * 32, "03" * 32],
            "reveal": ["loss", "accuracy", ("weights", "clinic")],
            "limits": {"total": 0},
            "nonce": "77" * 32,
        }
        return Policy.build(**{**fields, **changed})  # type: ignore[arg-type]

    return make


@pytest.fixture
def policy(make_policy: Callable[..., Policy]) -> Policy:
    return make_policy()


@pytest.fixture
def signatures(identities: list[Identity], policy: Policy) -> dict[int, str]:
    return {p: sign_policy(identities[p], policy, CODE) for p in range(3)}
