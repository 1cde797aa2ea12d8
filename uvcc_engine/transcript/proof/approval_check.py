"""What three domains approved beforehand, held against what was run: with keys that the auditor pinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError, VerificationError
from uvcc_engine.contract.job.rollout_phases import FULL, SMOKE
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof import barrier_check, input_attribution
from uvcc_engine.transcript.proof.bundle import Bundle, read_bundle
from uvcc_engine.transcript.proof.package import ExpectedSigners, PackageTarget
from uvcc_engine.transcript.signed import barriers, consents, roster
from uvcc_engine.transcript.signed.approvals import APPROVE
from uvcc_engine.transcript.signed.barriers import Barriers
from uvcc_engine.transcript.signed.proposals import FILE, Standing
from uvcc_engine.transcript.signed.roster import Roster
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.signers import AllowedSigners, Signer
from uvcc_engine.transcript.terms.policy import Policy
from uvcc_engine.transcript.terms.proposal import Proposal


def read_keys(files: Sequence[Path]) -> list[str]:
    """The key lines of three ``.pub`` files, comments aside. Raises UnreadableError."""
    lines = [" ".join(reading.read_text(f, 64 * reading.KIB, named=True).split()[:2]) for f in files]
    for line in lines:
        sshsig.person_material(line)
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
    _named(proposal, domains)
    for party, key in enumerate(proposal.domains):
        heard = standing.said.get(party)
        if heard is None or heard[0].decision != APPROVE:
            said = "said nothing of" if heard is None else "refused"
            raise VerificationError("domains", f"P{party}'s domain ({key}) {said} the proposal {proposal.id}")
    ran = {name: read_bundle(file, trusted=lambda _: True) for name, file in target.phases.items()}  # all were verified
    for name, bundle in ran.items():
        if differs := proposal.differs(bundle.policy, smoke=name == SMOKE):
            of = "" if name == target.decides else f" in phase {reading.shown(name, 80)}"
            raise VerificationError("domains", f"what was run{of} is not what the domains approved: {differs}")
    policy = ran[target.decides].policy
    said = f"approved     by the three domains that were named: proposal {proposal.id}"
    if not (target.root / roster.FILE).exists():
        if policy.proposal:  # by which the policy says that each domain drove its own pods
            raise VerificationError("domains", f"there is no {roster.FILE}: nobody shows that the domains drove it")
        return said
    return f"{said}\n{_driven(target, proposal, ran)}{_owners(target, proposal, ran)}"


def _owners(target: PackageTarget, proposal: Proposal, ran: Mapping[str, Bundle]) -> str:
    """Where data owners shared from their own machines: see that the inputs of each phase are theirs."""
    assert target.root is not None
    path = target.root / input_attribution.OWNERS_FILE
    if not proposal.owners or (not path.exists() and not ran[target.decides].policy.proposal):
        return ""  # of public data, or shared by the operator of all three parties
    rosters, bodies = _rosters(target.root, proposal), _due(path, "whose inputs they are")
    for bundle in ran.values():
        found = input_attribution.check(bodies, proposal, rosters, bundle.policy)
    return f"\nowners       {len(found)} shared for this attempt, to these pods; the policy commits to what they signed"


def vouched(target: PackageTarget, domains: Sequence[str]) -> ExpectedSigners | None:
    """Whom the rosters of a package name, where the domains of these keys signed them; None where there are none.

    So who pins three domains pins their pods. Raises VerificationError naming a domain that is none of these.
    """
    if target.root is None or not (target.root / roster.FILE).exists() or not (target.root / FILE).exists():
        return None
    proposal = Standing.from_json(reading.read_json(target.root / FILE)).signed.proposal
    _named(proposal, domains)
    found = _rosters(target.root, proposal)
    lines = [Signer(f"P{p}", r.pod(0).identity.ed25519) for p, r in found.items()]
    lines += [Signer(sshsig.COLLECTOR, r.collector) for r in found.values() if r.collector]
    signers = AllowedSigners(tuple(lines), "the rosters of the domains that were named")
    return ExpectedSigners("identities vouched for by the three domains that were named", lambda phase: signers)


def _named(proposal: Proposal, domains: Sequence[str]) -> None:
    for party, key in enumerate(proposal.domains):
        if key not in domains:
            raise VerificationError("domains", f"P{party} of the proposal is {key}, which is none of the domains named")


def _bodies(path: Path) -> list[str]:
    found = reading.read_json(path)
    if not isinstance(found, list) or not all(isinstance(body, str) for body in found):
        raise UnreadableError(f"{reading.shown(path)} is no list of signed records")
    return found


def _due(path: Path, what: str) -> list[str]:
    """The records of a file that a run of three domains has. Raises VerificationError where it was left out."""
    if not path.exists():
        raise VerificationError("domains", f"there is no {path.name}: nobody shows {what}")
    return _bodies(path)


def _rosters(root: Path, proposal: Proposal) -> dict[int, Roster]:
    """The three rosters of one attempt. Raises VerificationError naming a domain that vouches for nothing, or lies."""
    bodies = _bodies(root / roster.FILE)
    attempts = {attempt for of, attempt, _ in map(roster.says, bodies) if of == proposal.id}
    if len(attempts) != 1:
        raise VerificationError("rosters", f"{roster.FILE} holds rosters of {len(attempts)} attempts of the proposal")
    try:
        found = roster.gathered(proposal, attempts.pop(), bodies)
    except (ConfigError, ProtocolError) as e:
        raise VerificationError("rosters", e.what, e.hint) from e
    if missing := [f"P{p}" for p in range(PARTIES) if p not in found]:
        raise VerificationError("rosters", f"{', '.join(missing)} signed no roster of these pods")
    return dict(sorted(found.items()))


def _driven(target: PackageTarget, proposal: Proposal, ran: Mapping[str, Bundle]) -> str:
    """See that the pods are those of the rosters, and that all three domains signed their way to the policy's end."""
    assert target.root is not None
    rosters = _rosters(target.root, proposal)
    for p, r in rosters.items():
        for policy in (bundle.policy for bundle in ran.values()):
            if (policy.proposal, policy.attempt) != (proposal.id, r.attempt):
                what = f"the rosters are of attempt {r.attempt}, the policy is of {_attempt(policy)}"
                raise VerificationError("rosters", what, "files of two runs lie here")
            for replica in range(policy.topology.replicas):
                if policy.public(p, replica) != r.pod(replica).identity:
                    raise VerificationError(
                        "rosters", f"P{p}'s domain does not vouch for the pod p{p}r{replica} of the policy"
                    )
    try:
        found = barriers.gathered(proposal, rosters[0].attempt, _due(target.root / barriers.FILE, "how they drove it"))
    except ProtocolError as e:
        raise VerificationError("barriers", e.what, e.hint) from e
    barrier_check.check(found, rosters, ran, whole=target.whole)
    driven = f"driven       by these domains, each its own pods: 3 rosters, {len(found.reached)} barriers in order"
    return driven + barrier_check.told(found, target.decides) + _consented(target, proposal, rosters[0].attempt, found)


def _attempt(policy: Policy) -> str:
    return f"attempt {policy.attempt}" if policy.proposal else "one operator for all three domains"


def _consented(target: PackageTarget, proposal: Proposal, attempt: int, found: Barriers) -> str:
    """See that as many domains signed for the full run, and for each resume of it, as the proposal wants."""
    assert target.root is not None
    resumes = {b.resumed for b in found.of(target.decides).values()}
    if len(resumes) != 1:
        raise VerificationError("consents", "the domains do not agree how often the run was resumed")
    wanted = {consents.FULL: proposal.consent.full if target.decides == FULL else 0} | {
        consents.label(consents.RESUME, n): max(1, proposal.consent.resume) for n in range(1, max(resumes) + 1)
    }
    path = target.root / consents.FILE
    given = consents.gathered(proposal, attempt, _bodies(path) if path.exists() else [])
    for what, needed in wanted.items():
        who = given.get(what, set())
        if len(who) < needed:
            signed = ", ".join(f"P{p}" for p in sorted(who)) or "nobody"
            raise VerificationError("consents", f"{what} needed the word of {needed} domains; signed by {signed}")
    told = [f"{what} by {', '.join(f'P{p}' for p in sorted(given[what]))}" for what, n in wanted.items() if n]
    return f"\nconsented    {'; '.join(told)}" if told else ""
