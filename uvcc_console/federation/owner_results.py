"""What comes back to a data owner: sealed results, and a bundle that is held against the receipt before they open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_console.federation.parcels import Parcels, box_of
from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.safepaths import Refused, safe_relative
from uvcc_engine.contract.peer_protocol.record_names import MAIL_KEPT_S
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.proof import input_attribution, verifier
from uvcc_engine.transcript.proof.input_attribution import OWNERS_FILE
from uvcc_engine.transcript.proof.verification_certificate import Certificate
from uvcc_engine.transcript.signed import barriers, roster
from uvcc_engine.transcript.signed.owner_shares import OwnerShare
from uvcc_engine.transcript.signed.proposals import FILE as PROPOSAL_FILE
from uvcc_engine.transcript.signed.proposals import Standing
from uvcc_engine.transcript.signing.signers import AllowedSigners, Signer
from uvcc_engine.transcript.terms.policy import Policy

PHASE: Final = "full"
KEPT_DAYS: Final = MAIL_KEPT_S // 86_400
DOCUMENTS: Final = (PROPOSAL_FILE, roster.FILE, barriers.FILE, OWNERS_FILE)


@dataclass(frozen=True, slots=True)
class OwnerResults:
    """A run that held against the receipt: its policy, and how far that was checked."""

    policy: Policy
    certificate: Certificate


def results_box(proposal: str, attempt: int, number: int) -> int:
    """The mailbox of what comes back to an owner of one attempt."""
    return box_of(proposal, attempt, f"results/{number}")


def fetch(there: Rendezvous, share: OwnerShare, number: int, folder: Path) -> list[str]:
    """Take what the domains sent; their files' names. What was taken before and lies there is not sent again.

    Each domain's documents lie below ``P<n>``: one that sends others than the rest keeps nobody's out. Raises
    ConfigError if nothing lies there, ProtocolError for what is not what was announced.
    """
    parcels = Parcels(there, results_box(share.proposal, share.attempt, number), folder / "incoming")
    while parcels.poll():
        pass
    names: list[str] = []
    with DownloadFolder(folder) as downloads:
        for sender in range(PARTIES):
            for name in sorted(parcels.arrived(sender)):
                parts = safe_relative(name)
                box = name.endswith(".box")
                own = isinstance(parts, tuple) and parts[-1].startswith(f"result_p{sender}r")
                if isinstance(parts, Refused) or (box and not own):
                    continue  # a domain speaks for its own pods
                parcels.store(sender, name, downloads, parts if box else (_of(sender), *parts))
                names.append(name)
    if not names and not any((folder / at / PROPOSAL_FILE).exists() for at in ("", *map(_of, range(PARTIES)))):
        raise ConfigError(
            "nothing lies there for this owner",
            f"the domains send it when they collect, and the relay keeps it for {KEPT_DAYS} days; later one can "
            "hand over its run's artifacts: --from FOLDER",
        )
    return names


def _of(sender: int) -> str:
    return f"P{sender}"


def settled(folder: Path, share: OwnerShare, number: int, pins: Sequence[str]) -> OwnerResults:
    """The first domain's documents that hold against the receipt, laid into ``folder`` beside the sealed results.

    Raises what :func:`verified` does; where several domains sent documents, as whose each did not hold.
    """
    wrong: dict[int, UvccError] = {}
    for sender in range(PARTIES):
        at = folder / _of(sender)
        if not (at / PROPOSAL_FILE).exists():
            continue
        try:
            found = verified(at, share, number, pins)
        except (VerificationError, UnreadableError, ConfigError, ProtocolError) as e:
            wrong[sender] = e
            continue
        (folder / PHASE).mkdir(mode=0o700, exist_ok=True)
        for name in (*DOCUMENTS, f"{PHASE}/{leaf_file.BUNDLE}"):
            if (at / name).exists():
                write_atomic(folder / name, (at / name).read_bytes(), mode=0o600)
        return found
    if len(wrong) > 1:
        said = "; ".join(f"as {_of(sender)}'s: {e.what}" for sender, e in wrong.items())
        raise VerificationError("receipt", f"nothing holds of what came {said}", "ask those domains, or --from FOLDER")
    for error in wrong.values():
        raise error
    return verified(folder, share, number, pins)


def verified(folder: Path, share: OwnerShare, number: int, pins: Sequence[str]) -> OwnerResults:
    """Hold what came back against the receipt: the proposal that this owner saw, the pods that it sealed to, and the
    inputs that it signed, and the bundle that these pods signed. Raises VerificationError, UnreadableError.
    """
    standing = Standing.from_json(reading.read_json(folder / PROPOSAL_FILE))
    proposal = standing.signed.proposal
    if proposal.id != share.proposal:
        what = f"it is of the proposal {proposal.id[:16]}, shared was for {share.proposal[:16]}"
        raise VerificationError("receipt", what)
    for party, key in enumerate(proposal.domains):
        if key not in pins:
            raise VerificationError("receipt", f"P{party}'s domain is {key}, which is not pinned here")
    found = roster.gathered(proposal, share.attempt, _texts(folder / roster.FILE))
    for party in range(PARTIES):
        if party not in found or found[party].digest != share.rosters[party]:
            raise VerificationError("receipt", f"P{party}'s roster is not the one whose pods were sealed to")
    lines = tuple(Signer(f"P{p}", r.pod(0).identity.ed25519) for p, r in sorted(found.items()))
    signers = AllowedSigners(lines, "the rosters that were sealed to")
    certificate, bundle = verifier.examine(folder / PHASE / leaf_file.BUNDLE, allowed_signers=signers)
    policy = bundle.policy
    if policy.attempt != share.attempt:
        raise VerificationError("receipt", f"the policy is of attempt {policy.attempt}, not of {share.attempt}")
    if differs := proposal.differs(policy):
        raise VerificationError("receipt", f"what was run is not what the domains approved: {differs}")
    for party, listed in found.items():
        for replica in range(policy.topology.replicas):
            if policy.public(party, replica) != listed.pod(replica).identity:
                what = f"the policy names another pod as p{party}r{replica} than that domain's roster"
                raise VerificationError("receipt", what, f"P{party}'s domain did not vouch for it")
    shares = input_attribution.check(_texts(folder / OWNERS_FILE), proposal, found, policy)
    if shares[number] != share:
        raise VerificationError("receipt", "the run's inputs are not what this owner's receipt says that it shared")
    return OwnerResults(policy, certificate)


def _texts(path: Path) -> list[str]:
    found: Any = reading.read_json(path)
    if not isinstance(found, list) or not all(isinstance(body, str) for body in found):
        raise UnreadableError(f"{path.name} is no list of signed records", "have a domain send it again")
    return found


def parties_file(policy: Policy) -> str:
    """Who sealed, as the owner's program takes it."""
    return json.dumps([party.public.to_json() for party in policy.parties])
