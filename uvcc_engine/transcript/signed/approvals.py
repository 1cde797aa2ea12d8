"""What a domain signs with its own key: that it approves, or refuses, exactly one policy or proposal.

An approval names the text by its SHA-256 and the party that the domain is in it, so it holds for nothing else: not for
another text, not for another party, not for another kind of document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing import strict
from uvcc_engine.transcript.signed import orders

APPROVAL_NAMESPACE: Final = "uvcc-approval"
POLICY: Final = "policy"
PROPOSAL: Final = "proposal"
APPROVE: Final = "approve"
REFUSE: Final = "refuse"
LONGEST_REASON: Final = 500
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_TYPE: Final = "approval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """One domain's word about one text."""

    of: Literal["policy", "proposal"]
    sha256: str
    party: int
    decision: Literal["approve", "refuse"]
    reason: str = ""

    def __post_init__(self) -> None:
        if not _HASH.fullmatch(self.sha256) or self.party not in range(PARTIES):
            raise ConfigError("an approval that names no text or no party", "64 hex digits; 0, 1 or 2")
        if len(self.reason) > LONGEST_REASON or not self.reason.isprintable():
            raise ConfigError("the reason of an approval is too long", f"at most {LONGEST_REASON} printable characters")


def signed(approval: Approval, sign: Callable[[bytes], str]) -> str:
    """The approval with its signature, as it is sent and kept. ``sign`` signs under ``APPROVAL_NAMESPACE``."""
    return orders.sealed({"type": _TYPE, **asdict(approval)}, sign)


def opened(body: str, key: str) -> Approval | None:
    """What the domain of this key said; None if it did not sign this, or it is no approval. Never raises."""
    content = orders.opened(body, APPROVAL_NAMESPACE, [key])
    if content is None or content.get("type") != _TYPE:
        return None
    fields: Mapping[str, Any] = {k: v for k, v in content.items() if k != "type"}
    try:
        return strict.read(Approval, fields, "an approval")
    except ConfigError:
        return None


def claims(body: str) -> str:
    """Of which text a record says it is the word, as SHA-256; "" for anything else. Nothing is verified. Never raises.

    Whoever sorts the records of a stranger needs to check a signature only where it can matter.
    """
    try:
        found = json.loads(body)["content"]["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return found if isinstance(found, str) and _HASH.fullmatch(found) else ""


def check(body: str, key: str, *, of: str, sha256: str, party: int) -> None:
    """Hold an approval against the text that it is shown for. Raises ConfigError naming what is wrong with it."""
    whose = f"P{party}'s domain ({key})"
    if not body:
        raise ConfigError(f"{whose} has not approved this {of}", "a pod signs only what its own domain approved")
    found = opened(body, key)
    if found is None:
        raise ConfigError(f"the approval of this {of} is not signed by {whose}", "it was altered, or another signed it")
    if found.of != of or found.sha256 != sha256:
        raise ConfigError(
            f"{whose} approved another text, the {found.of} {found.sha256[:16]}, not this {of} {sha256[:16]}",
            "an approval holds for one text only and cannot be used again",
        )
    if found.party != party:
        raise ConfigError(f"{whose} approved it as P{found.party}", "an approval holds for one party only")
    if found.decision != APPROVE:
        raise ConfigError(f"{whose} refused this {of}: {found.reason or 'no reason given'}", "ask that domain")
