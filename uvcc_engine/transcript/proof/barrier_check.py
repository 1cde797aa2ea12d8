"""What three domains signed stage by stage, held against the phases that a package holds.

Where a stage has a result that all three have in common, the barrier's digest is its hash: so a domain signed which
rosters it met, which inputs came, which policy it approved, which result its phase had and which root it verified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from uvcc_engine.contract.errors import ProtocolError, VerificationError
from uvcc_engine.contract.job.rollout_phases import PHASES
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats.reading import shown
from uvcc_engine.transcript.proof.bundle import Bundle
from uvcc_engine.transcript.signed import barriers
from uvcc_engine.transcript.signed.barriers import Barriers
from uvcc_engine.transcript.signed.roster import Roster


def check(found: Barriers, rosters: Mapping[int, Roster], ran: Mapping[str, Bundle], *, whole: bool) -> None:
    """See that the barriers are in order, and report what was run. ``whole``: ``ran`` is every phase of the package.

    Raises VerificationError naming the stage, and the domain that signed something else or nothing.
    """
    named = [name for name in PHASES if found.of(barriers.POLICY + name) or found.of(name)]
    try:
        barriers.in_order(found, barriers.stages_of(named, drill=bool(found.of(barriers.DRILL))))
    except ProtocolError as e:
        raise VerificationError("barriers", e.what, e.hint) from e
    if absent := [name for name in named if whole and name not in ran and found.of(barriers.VERIFY + name)]:
        what = f"the domains signed that they verified {', '.join(absent)}, of which no bundle is here"
        raise VerificationError("barriers", what, "ask whoever collected it for the whole run")
    for stage, digest, said in _due(rosters, ran):
        reached = found.of(stage)
        missing = [f"P{p}" for p in range(PARTIES) if p not in reached]
        if missing and not stage.startswith(barriers.VERIFY):
            raise VerificationError("barriers", f"{', '.join(missing)} did not sign that it reached {shown(stage, 80)}")
        if odd := [f"P{p}" for p, b in reached.items() if b.digest != digest]:
            raise VerificationError("barriers", f"{', '.join(odd)} {said}")


def told(found: Barriers, phase: str) -> str:
    """Who did not sign that it verified a phase, and who signed that it failed; "" if all is well. A line for each."""
    reached = found.of(barriers.VERIFY + phase)
    silent = [f"P{p}" for p in range(PARTIES) if p not in reached]
    lines = [f"not signed   {', '.join(silent)} did not sign that it verified {phase} itself"] if silent else []
    failed = {p: b for p, b in sorted(found.stopped.items()) if b.status == barriers.FAILED}
    lines += [f"stopped      P{p} signed at {b.stage} that it goes no further: {b.reason}" for p, b in failed.items()]
    return "".join(f"\n{shown(line)}" for line in lines)


def _due(rosters: Mapping[int, Roster], ran: Mapping[str, Bundle]) -> Iterator[tuple[str, str, str]]:
    """By stage: the digest that its barriers must have, and what a domain did that signed another one."""
    digests = {str(p): r.digest for p, r in sorted(rosters.items())}
    yield barriers.ROSTER, _digest(digests), "signed over other rosters than those that lie here"
    for name, bundle in ran.items():
        policy, of = bundle.policy, shown(name, 80)
        inputs = {"owner": policy.owner, "commitments": list(policy.commitments)}
        yield barriers.SHARES, _digest(inputs), f"took other inputs than the policy of {of} commits to"
        yield barriers.POLICY + name, policy.hash.hex(), f"approved another policy of {of} than the one that was run"
        yield name, _digest(list(bundle.result_hashes)), f"signed another result of {of} than the one that lies here"
        root = str(bundle.epochs[-1]["global_root"])
        yield barriers.VERIFY + name, root, f"verified another run of {of}: its global root is not {root[:16]}"


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()
