"""What three domains approved beforehand, held against what was run: with keys that the auditor pinned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.topology import PARTIES
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof.bundle import read_bundle
from uvcc_engine.transcript.proof.package import PackageTarget
from uvcc_engine.transcript.signed.approvals import APPROVE
from uvcc_engine.transcript.signed.proposals import FILE, Standing
from uvcc_engine.transcript.signing import sshsig


def read_keys(files: Sequence[Path]) -> list[str]:
    """The key lines of three ``.pub`` files, comments aside. Raises UnreadableError."""
    lines = [" ".join(reading.read_text(f, 64 * reading.KIB, named=True).split()[:2]) for f in files]
    for line in lines:
        sshsig.public_raw(line)
    if len(set(lines)) != PARTIES:
        raise UnreadableError(
            f"{len(set(lines))} different keys of domains are named", "--domain once for each of three"
        )
    return lines


def check(target: PackageTarget, domains: Sequence[str]) -> str:
    """See that the domains of these keys approved what the deciding phase of a verified package ran.

    Returns a line for people. Raises VerificationError naming the domain, or in what the run differs from the proposal.
    """
    if target.root is None or not (target.root / FILE).exists():
        raise VerificationError("domains", f"there is no {FILE}: nobody shows what these domains approved")
    standing = Standing.from_json(reading.read_json(target.root / FILE))
    proposal = standing.signed.proposal
    for party, key in enumerate(proposal.domains):
        if key not in domains:
            raise VerificationError("domains", f"P{party} of the proposal is {key}, which is none of the domains named")
        heard = standing.said.get(party)
        if heard is None or heard[0].decision != APPROVE:
            said = "said nothing of" if heard is None else "refused"
            raise VerificationError("domains", f"P{party}'s domain ({key}) {said} the proposal {proposal.id}")
    policy = read_bundle(target.phases[target.decides], trusted=lambda _: True).policy  # it was verified
    if differs := proposal.differs(policy):
        raise VerificationError("domains", f"what was run is not what the domains approved: {differs}")
    return f"approved     by the three domains that were named: proposal {proposal.id}"
