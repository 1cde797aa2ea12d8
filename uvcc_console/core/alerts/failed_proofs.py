"""Who may have lied in a step whose proof failed, by what the workers of the three parties report.

Each worker reports whom it suspects: one of those lied, or the worker itself. Whoever all of them leave may have lied,
if at most one party did. Nothing here is signed: ``uvcc verify`` reads what the parties signed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.job.topology import PARTIES

_PARTY: Final = re.compile(r"P([0-2])")


def suspects_of(pod: str, fields: Mapping[str, Any]) -> set[int] | None:
    """Who may have lied by the word of one pod, itself among them; None where it says nothing that can be read."""
    listed, mine = fields.get("suspects"), re.match(r"p([0-2])", pod)
    if not isinstance(listed, list) or mine is None:
        return None
    found = [_PARTY.fullmatch(one) if isinstance(one, str) else None for one in listed]
    return {int(one[1]) for one in found if one is not None} | {int(mine[1])}


def failed_proof(s: Snapshot) -> str:
    """One sentence about the proof that failed in this phase; empty where none did."""
    if not s.failed_proofs:
        return ""
    step = max(int(fields["step"]) for fields in s.failed_proofs.values())
    said = [left for pod, fields in s.failed_proofs.items() if (left := suspects_of(pod, fields)) is not None]
    left = set(range(PARTIES)).intersection(*said)
    begin = f"a proof of step {step} failed, and nothing of it was revealed"
    names = [f"P{p}" for p in sorted(left)]
    if len(left) == 1:
        return f"{begin}: {names[0]} lied, or computes wrongly, if at most one domain is corrupt"
    if len(left) == 2:
        (other,) = set(range(PARTIES)) - left
        return f"{begin}: {' or '.join(names)} lied, and P{other} did not, if at most one domain is corrupt"
    return f"{begin}; who lied does not follow from what the parties report"
