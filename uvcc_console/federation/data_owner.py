"""The data owner's own machine: its key, the domains that it pinned, what it is asked for, and what it gives.

Nothing here reads a row: the owner's program splits and seals, in a process of its own; this sends what it sealed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import paths
from uvcc_console.federation import rendezvous
from uvcc_console.federation.domain_key import fingerprint
from uvcc_console.federation.parcels import PIECE, box_of, enqueue
from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_console.plan.exit_words import ended_how
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError, UvccError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.peer_protocol.record_names import OWNER_KEYS, OWNER_SHARES, ROSTERS
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.contract.text import counted
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.signed import owner_shares
from uvcc_engine.transcript.signed import roster as rosters
from uvcc_engine.transcript.signed.approvals import APPROVE
from uvcc_engine.transcript.signed.owner_shares import OWNER_NAMESPACE, OwnerShare, ShareFile
from uvcc_engine.transcript.signed.proposals import Equivocation, Standing
from uvcc_engine.transcript.signed.roster import Roster
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity
from uvcc_engine.transcript.terms.proposal import Proposal

PUBLIC: Final = "owner.pub"
PINS: Final = "domains.pub"
RECEIPT: Final = "receipt.json"
SENT: Final = "sent.json"
ANEW: Final = "set the clock, or have it proposed anew; uvcc propose --expires HOURS leaves more time"
LOOK_S: Final = 1.0
TOLD_EACH_S: Final = 60.0
Tell = Callable[[str, int, int], None]
"""Of a progress bar: what is done, how much of it, of how much."""


class NotYetError(ConfigError):
    """What others have not done yet; nobody is to blame."""


@dataclass(frozen=True, slots=True)
class OwnerRequest:
    """A proposal that names this owner, checked: approved by three pinned domains, with the rosters of an attempt."""

    standing: Standing
    number: int
    attempt: int
    rosters: Mapping[int, Roster]
    owners: tuple[PublicIdentity, ...]
    mailbox: int

    @property
    def proposal(self) -> Proposal:
        return self.standing.signed.proposal


def home(folder: Path | None = None) -> Path:
    """The owner's folder: its key, its pins, its receipts. Not necessarily there."""
    return folder or paths.config_dir() / "owner"


def create(folder: Path) -> Identity:
    """Make an owner's key. Raises ConfigError if there is one."""
    if folder.exists():
        raise ConfigError(f"{folder} is there already", "an owner's key is made once; name a new folder")
    made = Identity.create(folder)
    write_atomic(folder / PUBLIC, f"{made.public.ed25519} uvcc-owner\n".encode(), mode=0o644)
    return made


def pin(folder: Path, files: Sequence[Path]) -> list[str]:
    """Pin the keys of domains, in place of those pinned before. Raises UnreadableError, ConfigError."""
    from uvcc_console.federation.domain_key import read_public

    keys = [read_public(path) for path in files]
    if len(set(keys)) < PARTIES:
        what = f"{counted(len(set(keys)), 'key')} of domains named, they are three"
        raise ConfigError(what, "uvcc owner pin a.pub b.pub c.pub: all three at once")
    write_atomic(folder / PINS, "".join(f"{key}\n" for key in keys).encode(), mode=0o600)
    return keys


def pinned(folder: Path) -> list[str]:
    """The pinned keys. Raises ConfigError if there are none, UnreadableError."""
    if not (folder / PINS).exists():
        raise ConfigError("no domain's key is pinned here", "uvcc owner pin a.pub b.pub c.pub, fingerprints compared")
    keys = reading.read_text(folder / PINS, 64 * reading.KIB, named=True).splitlines()
    for key in keys:
        sshsig.person_material(key)
    return keys


def requests(there: Rendezvous, ours: PublicIdentity) -> tuple[list[Standing], list[Equivocation]]:
    """The proposals at the rendezvous that name this owner, and coordinators who told two tales. Raises UvccError."""
    found, twice = there.look()
    return [s for s in found.values() if ours.ed25519 in s.signed.proposal.owners], twice


def announce(there: Rendezvous, owner: Identity) -> int:
    """Say at the rendezvous with which key this owner seals; the other owners bind their shares to it.

    Returns the number that the owner's token has there.
    """
    body = owner_shares.key_signed(owner.public, lambda payload: owner.sign(OWNER_NAMESPACE, payload))
    return there.leave_as(f"{OWNER_KEYS}{_name(owner.public.ed25519)}", body)


def approved(standing: Standing, pins: Sequence[str], now: float) -> None:
    """See that three pinned domains approved exactly this text.

    Raises ConfigError naming the domain or coordinator, NotYetError naming all domains of whom there is no word yet.
    """
    p = standing.signed.proposal
    who = f"the coordinator {fingerprint(p.coordinator)}"
    unheard: list[str] = []
    for party, key in enumerate(p.domains):
        if key not in pins:
            what = f"{who} names as P{party} a domain that you did not pin: {fingerprint(key)}"
            raise ConfigError(what, "compare the digits by voice; uvcc owner pin takes the keys that you trust")
        heard = standing.said.get(party)
        whose = f"P{party}'s domain ({fingerprint(key)})"
        if heard is not None and heard[0].decision != APPROVE:
            what = f"{whose} refused this proposal ({heard[0].reason or 'no reason given'})"
            raise ConfigError(what, "a refusal stands: the coordinator makes another proposal")
        if heard is None:
            unheard.append(whose)
    if now >= p.expires:
        raise ConfigError(f"by this machine's clock the proposal of {who} has expired", ANEW)
    if unheard:
        has = "has" if len(unheard) == 1 else "have"
        raise NotYetError(f"{', '.join(unheard)} {has} not approved this proposal", "wait, or ask that domain")


def ready(there: Rendezvous, proposal_id: str, owner: Identity, pins: Sequence[str], attempt: int = -1) -> OwnerRequest:
    """Everything that an owner sees to before it shares. ``attempt``: the newest with three rosters where negative.

    Raises ConfigError or ProtocolError naming who is to blame, or who is being waited for.
    """
    found, twice = there.look()
    standing = rendezvous.chosen(found, proposal_id)
    p = standing.signed.proposal
    if owner.public.ed25519 not in p.owners:
        raise ConfigError("this proposal does not name this owner", "uvcc owner requests lists those that do")
    rendezvous.check_no_equivocation(standing.signed, twice)
    approved(standing, pins, time.time())
    bodies = there.look_bodies(f"{ROSTERS}{p.id}/")
    attempts = sorted({when for of, when, _ in map(rosters.says, bodies) if of == p.id and when >= 0}, reverse=True)
    wanted = [attempt] if attempt >= 0 else attempts
    whole = next((n for n in wanted if len(rosters.gathered(p, n, bodies)) == PARTIES), None)
    if whole is None:
        raise _no_roster(p, wanted[0] if wanted else 0, bodies)
    mailbox = announce(there, owner)
    keys = owner_shares.keys_of(p.owners, there.look_bodies(OWNER_KEYS))
    if missing := [fingerprint(key) for n, key in enumerate(p.owners) if n not in keys]:
        raise NotYetError(
            f"{', '.join(missing)}: no key to seal with was announced yet", "each owner runs uvcc owner requests once"
        )
    number = p.owners.index(owner.public.ed25519)
    if keys[number] != owner.public:
        raise ProtocolError(
            "another key to seal with was announced in this owner's name", "who has a copy of your key?"
        )
    rosters_ = rosters.gathered(p, whole, bodies)
    return OwnerRequest(standing, number, whole, rosters_, tuple(keys[n] for n in range(len(p.owners))), mailbox)


def waited(
    there: Rendezvous,
    proposal_id: str,
    owner: Identity,
    pins: Sequence[str],
    attempt: int,
    wait_s: float,
    tell: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> OwnerRequest:
    """As ``ready``, asked again for ``wait_s`` seconds while approvals, the domains' rosters, or another owner's key
    lack; ``tell`` hears of what, see ``Patience``.

    Raises what ``ready`` does: what somebody is to blame for at once, what is only not there yet after the time.
    """
    patience = Patience(wait_s, tell, sleep)
    while True:
        try:
            return ready(there, proposal_id, owner, pins, attempt)
        except NotYetError as e:
            if patience.over:
                raise
            patience.wait(e.what)


class Patience:
    """Waits for others, and tells for what and since when: at once, whenever that changes, and each minute."""

    def __init__(
        self,
        wait_s: float,
        tell: Callable[[str], None],
        sleep: Callable[[float], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._wait_s, self._tell, self._sleep = wait_s, tell, sleep
        self._since = time.strftime("%H:%M:%S UTC", time.gmtime(wall()))
        self._waited_s = self._due = 0.0
        self._what = ""

    @property
    def over(self) -> bool:
        """Whether it has waited as long as it may."""
        return self._waited_s >= self._wait_s

    def wait(self, what: str) -> None:
        """Wait a little; ``what`` is still to come."""
        if what != self._what or self._waited_s >= self._due:
            self._what, self._due = what, self._waited_s + TOLD_EACH_S
            self._tell(f"waits since {self._since}, {self._wait_s - self._waited_s:.0f} s more at most: {what}")
        self._sleep(LOOK_S)
        self._waited_s += LOOK_S


def _no_roster(p: Proposal, attempt: int, bodies: Sequence[str]) -> ConfigError:
    """Which domain's roster is missing, or was not signed by that domain."""
    there = {party for of, when, party in map(rosters.says, bodies) if (of, when) == (p.id, attempt)}
    signed = rosters.gathered(p, attempt, bodies)
    for party in range(PARTIES):
        who = f"P{party}'s domain ({fingerprint(p.domains[party])})"
        if party in there and party not in signed:
            what = f"the roster that lies there as P{party}'s is not signed by {who}"
            return ConfigError(what, "somebody swapped pods: ask it")
    missing = ", ".join(f"P{party}" for party in range(PARTIES) if party not in signed)
    what = f"no signed roster of {missing} lies there yet: its pods are not known"
    return NotYetError(what, "wait, and run it again, or say --wait SECONDS")


def folder_of(base: Path, request: OwnerRequest) -> Path:
    """Where an owner keeps the sealed files and the receipt of one attempt."""
    return base / "receipts" / f"{request.proposal.id[:16]}-{request.attempt}"


def join_folder(base: Path, request: OwnerRequest) -> Path:
    """Where an owner keeps what it finds with the others of the rows that all have, until it has sealed them."""
    return folder_of(base, request) / "join"


def ask_for(base: Path, request: OwnerRequest) -> Path:
    """Write down for the owner's program what it is asked for; the file."""
    p, out = request.proposal, folder_of(base, request)
    pods = [[request.rosters[q].pod(r).identity.to_json() for q in range(PARTIES)] for r in range(p.topology.replicas)]
    told = {
        "proposal": p.id,
        "attempt": request.attempt,
        "job": dict(p.job),
        "reveal": [[r.value, r.to] for r in p.reveal],
        "owners": [o.x25519 for o in request.owners],
        "pods": pods,
    }
    paths.ensure(out)
    write_atomic(out / owner_files.REQUEST, json.dumps(told).encode(), mode=0o600)
    return out / owner_files.REQUEST


def sealed(
    base: Path, request: OwnerRequest, files: Sequence[str], owner: Identity, tell: Tell, joined: str = ""
) -> OwnerShare:
    """Have the owner's program split and seal, and sign what it sealed; an attempt that was sealed is not sealed again:
    two versions of one owner's rows in one attempt could be told to different domains. ``joined``: what stands for the
    rows that were found with the other owners. Raises UvccError.
    """
    out, p = folder_of(base, request), request.proposal
    rosters_ = tuple(request.rosters[party].digest for party in range(PARTIES))
    if (out / RECEIPT).exists():
        share = receipt(out, owner.public.ed25519)
        if share.rosters != rosters_ or share.owners != tuple(o.x25519 for o in request.owners):
            raise ConfigError(
                f"attempt {request.attempt} was shared to other pods",
                "the domains begin another attempt; share to that",
            )
        return share
    command = ["--request", str(ask_for(base, request)), "--owner", str(base), "--out", str(out)]
    command += ["--joined", str(join_folder(base, request))] if joined else []
    made = run_sealing([*command, "--progress", "--fitted", str(out / owner_files.PREPROCESSING), *files], tell)
    first, second, third = (ShareFile(bytes=f["bytes"], sha256=f["sha256"]) for f in made["files"])
    c0, c1, c2 = made["commitments"]
    share = OwnerShare(
        version=owner_shares.VERSION,
        proposal=p.id,
        attempt=request.attempt,
        owner=owner.public,
        owners=tuple(o.x25519 for o in request.owners),
        rosters=(rosters_[0], rosters_[1], rosters_[2]),
        commitments=(c0, c1, c2),
        files=(first, second, third),
        rows=made["rows"],
        mailbox=request.mailbox,
        joined=joined,
    )
    body = owner_shares.share_signed(share, lambda payload: owner.sign(OWNER_NAMESPACE, payload))
    kept = {"share": body, **request.standing.to_json()}
    write_atomic(out / RECEIPT, json.dumps(kept, indent=1).encode() + b"\n", mode=0o600)
    shutil.rmtree(join_folder(base, request), ignore_errors=True)  # the joint key and the others' tags have done
    return share


def receipt(folder: Path, owner: str) -> OwnerShare:
    """What this owner signed that it shared. Raises UnreadableError."""
    found = reading.read_json(folder / RECEIPT)
    share = owner_shares.share_opened(str(found.get("share")), owner) if isinstance(found, dict) else None
    if share is None:
        raise UnreadableError(f"{folder / RECEIPT} is no receipt of this owner's", "take it from your backup")
    return share


def kept(base: Path, proposal: str, owner: Identity) -> tuple[Path, OwnerShare]:
    """The newest receipt for a proposal, by its id or the beginning of it, and its folder. Raises ConfigError."""
    folders = sorted((base / "receipts").glob("*-*"), key=lambda p: int(p.name.rpartition("-")[2]), reverse=True)
    for folder in folders:
        if (folder / RECEIPT).exists():
            share = receipt(folder, owner.public.ed25519)
            if proposal and share.proposal.startswith(proposal):
                return folder, share
    raise ConfigError(f"nothing was shared for the proposal {proposal[:64]!r}", f"the receipts are in {base}")


def run_sealing(args: Sequence[str], tell: Tell) -> dict[str, Any]:
    """Run ``uvcc-engine seal``. Raises UvccError with its own words."""
    command = [sys.executable, "-m", "uvcc_engine.cli", "seal", *args]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        last = ""
        for line in process.stderr:
            words = line.split()
            if words[:1] == ["progress"] and len(words) == 3:
                tell("sealed", int(words[1]), int(words[2]))
            elif words:
                last = line.strip()
        said = process.stdout.read()
    if process.returncode:
        if process.returncode < 0 or not last:
            raise UvccError(ended_how("the program that seals", process.returncode), "nothing was sent; share again")
        why = last.removeprefix("error: ")
        raise ConfigError(why) if process.returncode == ConfigError.exit_code else UvccError(why)
    found: dict[str, Any] = json.loads(said)
    return found


def send(there: Rendezvous, base: Path, request: OwnerRequest, share: OwnerShare, tell: Tell) -> None:
    """Put the sealed files and the signed statement there; what arrived before is not sent again. Raises UvccError."""
    out = folder_of(base, request)
    box = box_of(request.proposal.id, request.attempt, f"owner/{request.number}")
    sent = _sent(out / SENT)
    total, done = sum(f.bytes for f in share.files), 0
    for party, file in enumerate(share.files):
        name = f"sealed-p{party}.bin"
        path, at = out / name, sent.get(name, 0)
        if at < file.bytes and (not path.exists() or path.stat().st_size != file.bytes):
            raise UnreadableError(f"{path} is not what was sealed", "the domains begin another attempt; share to that")
        with path.open("rb") if path.exists() else open("/dev/null", "rb") as f:
            f.seek(at)
            while at < file.bytes:
                piece = f.read(PIECE)
                enqueue(there, box, party, name, (file.bytes, file.sha256), at, piece)
                at += len(piece)
                sent[name] = at
                write_atomic(out / SENT, json.dumps(sent).encode(), mode=0o600, durable=False)
                tell("sent", done + at, total)
        done += file.bytes
    body = str(reading.read_json(out / RECEIPT)["share"])
    there.leave(f"{OWNER_SHARES}{request.proposal.id}/{request.attempt}/{request.number}", body)
    if any(r.value == "seeds" for r in request.proposal.reveal):
        return  # a replay of the run opens them with what the parties disclose
    for party in range(PARTIES):  # the relay has them; an owner keeps its data and the receipt
        (out / f"sealed-p{party}.bin").unlink(missing_ok=True)


def _sent(path: Path) -> dict[str, int]:
    """How many bytes of each file are there already; what cannot be read counts as nothing."""
    try:
        found = reading.read_json(path) if path.exists() else {}
    except UnreadableError:
        found = {}
    return {str(k): v for k, v in found.items() if type(v) is int and v > 0} if isinstance(found, dict) else {}


def _name(key: str) -> str:
    return hashlib.sha256(sshsig.public_raw(key)).hexdigest()[:32]
