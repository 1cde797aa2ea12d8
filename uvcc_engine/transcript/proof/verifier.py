"""Decide from files alone whether a run was the run that was agreed. Trusts no party and no operator.

Every check compares a recomputed value with a stated one; the first that fails is raised as VerificationError with both
values. Nothing is believed because the bundle says so: even "finished" follows from the signed result alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import OPENED_KINDS, SENT, Leaf, blinded_digest
from uvcc_engine.transcript.leaves.replay import first_difference, peers_of
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.leaves.store import Opening
from uvcc_engine.transcript.proof.bundle import (
    NAME,
    Bundle,
    WorkerPart,
    derived_roots,
    find_folders,
    most_entries,
    read_bundle,
)
from uvcc_engine.transcript.proof.cross_signatures import at_party as _at
from uvcc_engine.transcript.proof.cross_signatures import check_files, check_head, check_histories
from uvcc_engine.transcript.proof.form import check_form, floors, has_form
from uvcc_engine.transcript.proof.leaf_recomputation import equal as _equal
from uvcc_engine.transcript.proof.leaf_recomputation import recompute
from uvcc_engine.transcript.proof.verification_certificate import Certificate
from uvcc_engine.transcript.signed.openings import root_with
from uvcc_engine.transcript.signing.signers import AllowedSigners, read_allowed_signers
from uvcc_engine.transcript.signing.sshsig import NAMESPACES, RESULT_NAMESPACE, ROOT_NAMESPACE
from uvcc_engine.transcript.terms.policy import Policy, check_signatures

Pins = Path | AllowedSigners | Mapping[str, str]


def verify(
    path: Path,
    *,
    allowed_signers: Pins | None = None,
    policy: Path | None = None,
    transcripts: Path | None = None,
    against: Path | None = None,
    head: tuple[int, str] | None = None,
) -> Certificate:
    """Verify a bundle, given as file or as its folder.

    ``allowed_signers``: pinned keys of P0, P1, P2 (file or mapping); ``policy``: the policy file one expects;
    ``transcripts``: folder with every worker's transcript (default: the bundle's folder, if any lies there);
    ``against``: a bundle of a rerun that must have the same roots and results; ``head``: (epochs, hex) that somebody
    noted while the run went on, of the run's tree or of a worker's signed statement: the run must extend it.
    Raises VerificationError naming the first check that fails, UnreadableError if something cannot be read.
    """
    return examine(
        path, allowed_signers=allowed_signers, policy=policy, transcripts=transcripts, against=against, head=head
    )[0]


def examine(
    path: Path,
    *,
    allowed_signers: Pins | None = None,
    policy: Path | None = None,
    transcripts: Path | None = None,
    against: Path | None = None,
    head: tuple[int, str] | None = None,
) -> tuple[Certificate, Bundle]:
    """:func:`verify`, and the bundle that was verified."""
    file = path / NAME if path.is_dir() else path
    pins = _signers(allowed_signers)
    expected = Policy.load(policy) if policy is not None else None
    bundle = read_bundle(file, lambda stated: _check_identities(stated, pins, expected))
    _check_structure(bundle)
    unread: list[str] = []
    folders = _folders(bundle, transcripts, file.parent, unread)
    _check_bundle(bundle, folders)
    if head is not None:
        check_head(bundle, head)
    form = floors(bundle.policy, len(bundle.epochs), bundle.steps) if has_form(bundle.policy) else []
    if folders:
        check_files(bundle, folders)
        tallies = {w.coord: recompute(bundle.policy, w, folders[w.coord]) for w in bundle.workers}
        check_form(form, tallies)
    if against is not None:
        _check_rerun(bundle, against, pins)
    pinned = pins is not None or expected is not None
    certificate = _certificate(bundle, "transcripts" if folders else "bundle", pinned)
    return replace(certificate, pinned=pinned, unread=tuple(unread)), bundle


# ---- identities and structure --------------------------------------------------------------------------------------


def _signers(pins: Pins | None) -> AllowedSigners | None:
    """What the caller pins, in one form."""
    if pins is None or isinstance(pins, AllowedSigners):
        return pins
    return read_allowed_signers(pins) if isinstance(pins, Path) else AllowedSigners.of(pins)


def _check_identities(policy: Policy, pins: AllowedSigners | None, expected: Policy | None) -> bool:
    """Compare with what the auditor brought along; True if the identities are pinned by it."""
    if expected is not None:
        _equal("policy", "the bundle's policy hash", policy.hash, expected.hash)
    if pins is None:
        return expected is not None
    for party in policy.parties:
        if why := pins.refusal(f"P{party.party}", party.public.ed25519, NAMESPACES):
            raise VerificationError("identity", why)
    return True


def _check_structure(bundle: Bundle) -> None:
    """Exactly the policy's workers, each with the same epochs 0..E-1, in order."""
    size = bundle.policy.topology
    _equal("workers", "the number of workers", len(bundle.workers), size.workers)
    wanted = sorted(size.coords())
    _equal("workers", "the list of workers", [str(w.coord) for w in bundle.workers], [str(c) for c in wanted])
    epochs = len(bundle.workers[0].roots)
    steps = bundle.steps - bundle.policy.first_step
    if epochs not in (steps, steps + 1):
        raise VerificationError(
            "epochs", f"{epochs} epochs are signed, the run's {steps} steps need {steps} or one more"
        )
    for worker in bundle.workers:
        numbers = [s.root.epoch for _, s in worker.roots]
        _equal("epochs", f"the epoch list of {worker.coord}", numbers, list(range(epochs)))


def _folders(bundle: Bundle, given: Path | None, beside: Path, unread: list[str]) -> Mapping[Coord, Path]:
    """Every worker's transcript folder; empty if none was given and none lies beside the bundle.

    Folders that cannot be listed go into ``unread``; if they may hold the transcripts that lack, none are recomputed.
    """
    if given is not None and not given.is_dir():
        raise UnreadableError(f"no folder {given}", "name the folder that holds the transcripts")
    found = find_folders(given or beside, most_entries(bundle.policy.topology.workers), unread)
    wanted = set(bundle.policy.topology.coords())
    if (not found and given is None) or (unread and found.keys() < wanted):
        return {}
    if found.keys() != wanted:
        odd = sorted(str(c) for c in found.keys() ^ wanted)
        raise VerificationError(
            "transcripts", f"{', '.join(odd)}: transcripts must be exactly those of the policy's workers"
        )
    return found


# ---- what is signed ------------------------------------------------------------------------------------------------


def _check_bundle(bundle: Bundle, folders: Mapping[Coord, Path]) -> None:
    policy = bundle.policy
    check_signatures(policy, bundle.signatures)
    for worker in bundle.workers:
        _check_roots(policy, worker)
    by_coord = {w.coord: w for w in bundle.workers}
    for worker in bundle.workers:
        for peer in peers_of(worker.coord.party):
            _check_peer(worker, by_coord[_at(worker.coord, peer)], folders)
    for worker in bundle.workers:
        _check_result(policy, worker, bundle.workers[0], bundle.steps)
        _check_openings(policy, worker)
    check_histories(bundle)
    for worker in bundle.workers:
        mate = by_coord[_at(worker.coord, 0)]
        _equal("result", f"result hash of {worker.coord}", worker.result[1].result_hash, mate.result[1].result_hash)
    roots = [[s.root.root for _, s in w.roots] for w in bundle.workers]
    epochs, overall = derived_roots(policy, [w.coord for w in bundle.workers], roots)
    _equal("global roots", "the number of epochs", len(bundle.epochs), len(epochs))
    for stated, found in zip(bundle.epochs, epochs, strict=True):
        for key in ("epoch", "replica_roots", "global_root"):
            _equal("global roots", f"{key} of epoch {found['epoch']}", stated[key], found[key])
    _equal("run root", "the run root", bundle.run_root, overall)
    hashes = sorted({w.result[1].result_hash.hex() for w in bundle.workers})
    _equal("result", "the list of result hashes", list(bundle.result_hashes), hashes)


def _check_roots(policy: Policy, worker: WorkerPart) -> None:
    public = policy.public(worker.coord.party, worker.coord.replica)
    for signed, statement in worker.roots:
        where = f"epoch {statement.root.epoch} of {worker.coord}"
        _equal("root statement", f"the worker in {where}", str(statement.coord), str(worker.coord))
        _equal("root statement", f"sid_job in {where}", statement.sid_job, policy.sid_job)
        if not signed.holds(public, ROOT_NAMESPACE):
            raise VerificationError(
                "root signature", f"{where}: root {statement.root.root.hex()} is not signed by its key"
            )


def _check_peer(worker: WorkerPart, peer: WorkerPart, folders: Mapping[Coord, Path]) -> None:
    """Both ends recorded the same messages in every epoch, and countersigned each other's roots."""
    me, other = worker.coord.party, peer.coord.party
    for (_, mine), (_, theirs) in zip(worker.roots, peer.roots, strict=True):
        epoch, one, two = mine.root.epoch, mine.root.pairs[other], theirs.root.pairs[me]
        if one != two:
            what = f"epoch {epoch}: {worker.coord} recorded {one.hex()}, {peer.coord} {two.hex()}"
            raise VerificationError("pairing", what + _locate(worker.coord, peer.coord, epoch, folders))
    for (_, theirs), (_, mine) in zip(peer.roots, worker.roots[1:], strict=False):
        where = f"root of {peer.coord} at epoch {theirs.root.epoch} as countersigned by {worker.coord}"
        _equal("countersignature", where, mine.seen[other], theirs.root.root)


def _locate(one: Coord, two: Coord, epoch: int, folders: Mapping[Coord, Path]) -> str:
    """Which message two workers recorded differently, where their transcripts can be read."""
    if not folders:
        return ""
    mine, theirs = (_epoch_records(folders[coord], epoch) for coord in (one, two))
    named = first_difference(mine, theirs, one.party, two.party)
    return f"; first: {named}" if named else ""


def _epoch_records(folder: Path, epoch: int) -> Iterator[bytes]:
    """One epoch's records, streamed; none if the file does not hold it."""
    for file, block in leaf_file.blocks(folder / leaf_file.LEAVES):
        if block.epoch == epoch:
            yield from leaf_file.records(file, block)


# ---- result and opened leaves --------------------------------------------------------------------------------------


def _check_result(policy: Policy, worker: WorkerPart, first: WorkerPart, steps: int) -> None:
    signed, statement = worker.result
    name = str(worker.coord)
    _equal("result statement", f"the worker in the result of {name}", str(statement.coord), name)
    _equal("result statement", f"sid_job in the result of {name}", statement.sid_job, policy.sid_job)
    _equal("result statement", f"the number of epochs in the result of {name}", statement.epochs, len(worker.roots))
    _equal("result statement", f"the last root in the result of {name}", statement.root, worker.roots[-1][1].root.root)
    _equal("result statement", f"steps in the result of {name}", statement.steps, steps)
    if not signed.holds(policy.public(worker.coord.party, worker.coord.replica), RESULT_NAMESPACE):
        raise VerificationError("result signature", f"{name}: {statement.result_hash.hex()} is not signed by its key")
    for value in statement.values:
        if not policy.reveals(value):
            raise VerificationError("result", f"{name} reveals {value!r}, which the policy does not list")
    _equal("result", f"the values of {name}", dict(statement.values), dict(first.result[1].values))


def _check_openings(policy: Policy, worker: WorkerPart) -> None:
    """Every opened leaf is in a signed root and says what it must; policy, inputs and result are among them."""
    order = [(o.epoch, o.index) for o in worker.openings]
    if order != sorted(set(order)):
        raise VerificationError("openings", f"the opened leaves of {worker.coord} are not in order: {order}")
    seen: dict[int, int] = dict.fromkeys(range(len(worker.roots)), 0)
    kinds_seen: list[tuple[int, int]] = []
    for opening in worker.openings:
        if opening.epoch not in seen:
            raise VerificationError("openings", f"{worker.coord} opens a leaf of epoch {opening.epoch} of {len(seen)}")
        seen[opening.epoch] += 1
        kinds_seen.append((_check_opening(policy, worker, opening), opening.epoch))
    for (_, statement), count in zip(worker.roots, seen.values(), strict=True):
        where = f"opened leaves of {worker.coord} in epoch {statement.root.epoch}"
        _equal("openings", where, count, statement.root.opened)
    last = len(worker.roots) - 1
    started = [0] if policy.migration is not None else []
    for kind, epochs in ((kinds.POLICY, [0]), (kinds.START, started), (kinds.INPUT, [0]), (kinds.RESULT, [last])):
        found = [e for k, e in kinds_seen if k == kind]
        _equal("openings", f"epochs with a {kinds.NAMES[kind]} leaf of {worker.coord}", found, epochs)


def _check_opening(policy: Policy, worker: WorkerPart, opening: Opening) -> int:
    """Check one opened leaf; returns its kind."""
    statement = worker.roots[opening.epoch][1]
    leaf = Leaf.unpack(opening.record)
    party = worker.coord.party
    where = f"{leaf.name}, epoch {opening.epoch} of {worker.coord}"
    if (leaf.direction, leaf.src, leaf.dst) != (SENT, party, party) or leaf.kind not in OPENED_KINDS:
        raise VerificationError("openings", f"{where} is no local leaf of this party")
    root = root_with(opening, sid_of(policy.sid_job, worker.coord), statement.root)
    _equal("inclusion", f"the signed root with {where}", statement.root.root, root)
    _equal("opening", f"the digest of {where}", leaf.digest, blinded_digest(leaf.kind, opening.blind, opening.payload))
    _equal("opening", f"the size of {where}", leaf.size, len(opening.payload))
    if leaf.kind == kinds.POLICY:
        _equal("opening", where, opening.payload, policy.hash)
    elif leaf.kind == kinds.INPUT:
        _equal("opening", where, opening.payload.hex(), policy.commitments[party])
    elif leaf.kind == kinds.RESULT:
        _equal("opening", where, opening.payload, worker.result[1].core)
    elif leaf.kind == kinds.START:
        _equal("opening", where, opening.payload, policy.migration.leaf if policy.migration is not None else b"")
    else:
        _check_checkpoint(where, opening.payload, leaf.op)
    return leaf.kind


def _check_checkpoint(where: str, payload: bytes, step: int) -> None:
    try:
        found = json.loads(payload)
        good = isinstance(found, dict) and set(found) == {"sha256", "step"} and canonical(found) == payload
    except (ValueError, RecursionError):
        good = False
    if not good or found["step"] != step:
        raise VerificationError("opening", f"{where} does not name a checkpoint of step {step}: {payload[:80]!r}")


# ---- reruns and the certificate ------------------------------------------------------------------------------------


def _check_rerun(bundle: Bundle, against: Path, pins: AllowedSigners | None) -> None:
    """Another bundle that verifies by itself and has the same job, roots and results."""
    file = against / NAME if against.is_dir() else against
    other = read_bundle(file, lambda stated: _check_identities(stated, pins, None))
    _check_structure(other)
    _check_bundle(other, {})
    _equal("rerun", "sid_job", bundle.policy.sid_job, other.policy.sid_job)
    for one, two in zip(bundle.epochs, other.epochs, strict=False):
        _equal("rerun", f"global root of epoch {one['epoch']}", one["global_root"], two["global_root"])
    _equal("rerun", "run root", bundle.run_root, other.run_root)
    _equal("rerun", "result hashes", list(bundle.result_hashes), list(other.result_hashes))


def _certificate(bundle: Bundle, level: str, pinned: bool) -> Certificate:
    policy = bundle.policy
    warnings = []
    if policy.seeded:
        who = ", ".join(f"P{p}" for p in policy.seeded)
        warnings.append(f"identities of {who} come from a public seed: a demonstration, not evidence")
    if not pinned:
        warnings.append("identities are those the bundle names; pin them with --allowed-signers or --policy")
    if level == "bundle":
        warnings.append("no transcripts at hand: leaves were not recomputed")
    elif not has_form(policy):
        warnings.append("the policy names no model and batch: the form of the messages was not checked")
    if len(bundle.result_hashes) > 1:
        warnings.append(f"{len(bundle.result_hashes)} result hashes: subsessions hold different parts of the result")
    roots = [s.root for w in bundle.workers for _, s in w.roots]
    parties = [p.to_json() for p in policy.parties]
    verdicts = [s.proved for w in bundle.workers if w.coord.party == 0 for _, s in w.roots if s.proved]
    return Certificate(
        level,
        policy.sid_job.hex(),
        policy.hash.hex(),
        bundle.epochs[-1]["global_root"],
        bundle.run_root,
        len(bundle.epochs),
        sum(r.leaves for r in roots),
        tuple(bundle.result_hashes),
        bundle.workers[0].result[1].values,
        tuple(parties),
        tuple(warnings),
        policy.operation.sentences(),
        policy.proving,
        sum(v.claims for v in verdicts),
        sum(len(v.audited(policy.proving)) for v in verdicts),
        sum(len(v.drawn) for v in verdicts),
    )
