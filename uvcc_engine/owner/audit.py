"""The data owner's audit: replay a whole run from the parties' seeds and name the party that strayed from the program.

A run is a function of policy, inputs and seeds, so the owner can compute every message that the three parties should
have sent. A transcript shows what each of them did send. Whoever sent something else, having received until then only
what the replay received, is at fault, alone: the same holds for a share altered inside a product, which the parties
cannot notice while they run (the additive attack on Araki et al., CCS 2016), and for an altered opening, which they
notice without knowing which of two holders lied.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.text import clean_block
from uvcc_engine.model.definition.base_model import attached, read_base
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.mpc.foundation.local import LocalPlane, LocalPlanes
from uvcc_engine.mpc.foundation.prg import PairKeys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.owner.client import sealed_name
from uvcc_engine.owner.fleet_replay import Timed, replay_fleet
from uvcc_engine.plane.api import Buffer, Tag
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.sealing.seeds import Seeds, check_pairs, open_seeds, seeds_name
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.transcript.exchange.own_history import signed_epochs
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import RECEIVED, SENT, WIRE_KINDS, Key, Leaf, epoch_key, make_record
from uvcc_engine.transcript.leaves.payload_digests import chunks
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.leaves.write_ahead_log import open_records
from uvcc_engine.transcript.proof.bundle import POLICY_FILE, find_folders
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy

_PATIENCE_S: Final = 3600.0
_CUT: Final = "the transcripts end here: the run did, or the rest was not handed over"
LeafRecords = Mapping[Key, bytes]


@dataclass(frozen=True, slots=True)
class Audit:
    """What a replay found. ``parties`` is empty if every message was as computed; two, if only their pair is known.
    ``note``: how far that can be relied on, where there is something to say.
    """

    epochs: int
    messages: int
    parties: tuple[int, ...] = ()
    epoch: int = -1
    what: str = ""
    note: str = ""

    def text(self) -> str:
        """The finding for people."""
        replayed = f"{self.epochs} epochs replayed, {self.messages} recorded messages compared"
        replayed += f"\n             {self.note}" if self.note else ""
        if not self.parties:
            return f"AS AGREED    {replayed}: every party sent what the program computes"
        who = " or ".join(f"P{p}" for p in self.parties)
        return f"STRAYED      {who} at epoch {self.epoch}: {self.what}\n             {replayed}"


class _Notes:
    """A party's plane that notes every message in the order of the program, as the party's transcript would."""

    def __init__(self, plane: LocalPlane, sid_sub: bytes, blinds: Mapping[int, bytes]) -> None:
        self._plane, self._sid, self._blinds = plane, sid_sub, blinds
        self.party = plane.party
        self.records: list[bytes] = []

    def begin(self, epoch: int) -> None:
        self.records = []
        self._keys_of_epoch = {p: epoch_key(key, self._sid, epoch) for p, key in self._blinds.items()}

    def _note(self, direction: int, peer: int, tag: Tag, payload: Buffer) -> None:
        src, dst = (peer, self.party) if direction else (self.party, peer)
        for chunk, piece in chunks(payload):
            key = (tag.stream, tag.op, chunk, direction, src, dst, tag.kind)
            self.records.append(make_record(self._keys_of_epoch[peer], key, piece)[0])

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        self._note(SENT, dst, tag, payload)
        self._plane.send(dst, tag, payload)

    def recv(self, src: int, tag: Tag) -> memoryview:
        body = self._plane.recv(src, tag)
        self._note(RECEIVED, src, tag, body)
        return body

    def send_control(self, dst: int, body: bytes) -> None:
        self._plane.send_control(dst, body)

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        return self._plane.recv_control(src, timeout)

    def close(self, *, graceful: bool = True) -> None:
        self._plane.close(graceful=graceful)


class ReplayKeys(Protocol):
    """What a party draws its masks and blinds its digests with: its seeds of a session."""

    @property
    def prg(self) -> PairKeys:
        """The keys of its pseudorandom streams."""

    @property
    def blinds(self) -> Mapping[int, bytes]:
        """Party -> key that blinds leaves with it."""

    @property
    def attempt(self) -> int:
        """Which attempt of the session it is."""


def replay(
    policy: Policy, seeds: Mapping[int, Seeds], sealed: Mapping[int, bytes], base: Path | None = None
) -> Iterator[list[list[bytes]]]:
    """Every epoch's transcript records by party, in the order of the program; the last epoch opens the result.

    ``base``: the file of the public base, where the job names one.

    Raises ConfigError for a job that this replay does not know, VerificationError for inputs that are not the policy's.
    """
    check_replays(policy)
    job, model = PrivateJob.from_json(policy.job), None
    if job.base:
        if base is None:
            raise ConfigError(f"the job computes with the public base {job.base[:12]}", "name its file with --base")
        model = attached(fit_model(job), read_base(base, job.base))
    return program(policy, seeds, {p: s.inputs(sealed[p], policy) for p, s in seeds.items()}, model=model)


def check_replays(policy: Policy) -> None:
    """Refuse (ConfigError) a job that :func:`program` does not know."""
    job, size = PrivateJob.from_json(policy.job), policy.topology
    if size.workers_per_party * size.microbatches != 1 or job.task != "train" or job.start is not None:
        raise ConfigError(
            "only a training with one worker per party and one microbatch, from its beginning, can be replayed",
            "run the same job with replicas, stages, tensor and microbatches of 1",
        )


def program(
    policy: Policy,
    keys: Mapping[int, ReplayKeys],
    inputs: Mapping[int, PartyInputs],
    steps: int | None = None,
    model: ModelSpec | None = None,
) -> Iterator[list[list[bytes]]]:
    """The records that a job's program makes of these inputs with these keys, epoch by epoch: see :func:`replay`.

    ``steps``: after so many the run ended; by default where the values say that come out here. ``model``: the job's,
    where it computes with a public base.
    """
    job = PrivateJob.from_json(policy.job)
    model = fit_model(job) if model is None else model
    local = LocalPlanes()
    local.wire.wait_s = _PATIENCE_S  # a party waits while the others compute on the same processor
    notes = []
    for p, s in sorted(keys.items()):
        sid = sid_of(policy.sid_job, Coord(0, p, 0, 0))
        notes.append(_Notes(local.planes[p], sid, s.blinds))
        local.runtimes[p] = Runtime(
            p, notes[p], s.prg, sid, s.attempt, prg=job.random_generator, few_rounds=job.rounds == "few"
        )
    trainers = [trainer_of(rt, job, model, inputs[rt.party]) for rt in local.runtimes]
    for rt in local.runtimes:
        if rt.ledger is not None:
            rt.ledger.defers = True  # as workers do
    for epoch in range(job.steps + 1):
        last = epoch == job.steps or (trainers[0].validations.ended if steps is None else epoch == steps)

        def body(rt: Runtime, epoch: int = epoch, last: bool = last) -> None:
            notes[rt.party].begin(epoch)
            rt.begin_epoch(epoch)
            if last:
                trainers[rt.party].evaluate()
                return
            owed = trainers[rt.party].step(epoch).owed
            if owed is not None:
                owed.take_as_held()

        local.run_three(body)
        yield [n.records for n in notes]
        if last:
            return


def recorded(folder: Path, epoch: int) -> tuple[LeafRecords, bool]:
    """What a worker's transcript holds of an epoch, and whether it was finalised. Raises UnreadableError."""
    for file, block in leaf_file.blocks(folder / leaf_file.LEAVES):
        if block.epoch == epoch:
            return _by_key(leaf_file.records(file, block)), True
    return _by_key(open_records(folder, epoch)), False


def _by_key(records: Iterator[bytes]) -> LeafRecords:
    leaves = ((Leaf.unpack(r), r) for r in records)
    return {leaf.key: r for leaf, r in leaves if leaf.kind in WIRE_KINDS}


def first_deviation(program: Sequence[bytes], found: LeafRecords, *, whole: bool) -> Leaf | None:
    """The first message, in the order of the program, that a party recorded differently from the replay.

    In an epoch that was cut short (``whole`` is False) what is missing was not reached.
    """
    keys = set()
    for record in program:
        leaf = Leaf.unpack(record)
        keys.add(leaf.key)
        if found.get(leaf.key, None if whole else record) != record:
            return leaf
    extra = min(found.keys() - keys, default=None)
    return None if extra is None else Leaf.unpack(found[extra])


def _sent_as_computed(leaf: Leaf, of_sender: LeafRecords) -> bool:
    """Whether what arrived otherwise than computed was sent as computed: else its sender had been misled before."""
    sent = leaf._replace(direction=SENT)
    return of_sender.get(sent.key) == sent.pack()


def judge(epoch: int, program: Sequence[Sequence[bytes]], found: Sequence[tuple[LeafRecords, bool]]) -> Audit | None:
    """Who strayed in an epoch, or None.

    A party that first *sent* something else is at fault; one that first received something else is not. Where all was
    sent as computed and still one message arrived otherwise, its two ends are named.
    """
    first = [first_deviation(p, f, whole=whole) for p, (f, whole) in zip(program, found, strict=True)]
    guilty = [p for p, leaf in enumerate(first) if leaf is not None and leaf.direction == SENT]
    if guilty:
        leaf = first[guilty[0]]
        assert leaf is not None
        return Audit(0, 0, tuple(guilty), epoch, f"{leaf.name} is not what the program sends there")
    astray = [leaf for leaf in first if leaf is not None]
    for leaf in sorted(astray, key=lambda leaf: not _sent_as_computed(leaf, found[leaf.src][0])):
        ends = tuple(sorted((leaf.src, leaf.dst)))
        return Audit(0, 0, ends, epoch, f"{leaf.name} is not what its sender recorded")
    return None


def audit(
    root: Path, owner: Identity, sealed: Path, policy_file: Path | None = None, base: Path | None = None
) -> Audit:
    """Replay the run whose transcripts and seeds lie anywhere below ``root``.

    ``sealed``: the folder into which the owner shared its inputs; ``base``: the job's public base. Whoever handed the
    folder over may have written what he likes, so each epoch that a worker signed is held to its signature. Raises
    UnreadableError for what is missing, VerificationError if a transcript is not the signed one or the parties' seeds
    contradict each other, ConfigError for a job that cannot be replayed.
    """
    policy = Policy.load(policy_file or root / POLICY_FILE)
    size = policy.topology
    alone = size.workers_per_party * size.microbatches == 1
    coords = [Coord(0, p, 0, 0) for p in range(PARTIES)] if alone else list(size.coords())
    folders = find_folders(root)
    if missing := [str(c) for c in coords if c not in folders]:
        raise UnreadableError(f"no transcript of {', '.join(missing)} under {root}", "collect the run first")
    disclosed = {
        c: open_seeds(
            _only(root, seeds_name(c)), owner=owner, sender=policy.public(c.party, c.replica), policy=policy, coord=c
        )
        for c in coords
    }
    for c in coords:
        if c.party == 0:
            check_pairs({p: disclosed[replace(c, party=p)] for p in range(PARTIES)})
    signed = _signed(policy, coords, folders)
    if not alone:
        return _of_fleet(policy, disclosed, folders, signed, sealed)
    seeds = {c.party: found for c, found in disclosed.items()}
    boxes = {p: _only(sealed, sealed_name(p)) for p in range(PARTIES)}
    epochs = messages = 0
    for epoch, program in enumerate(replay(policy, seeds, boxes, base)):
        found = [recorded(folders[c], epoch) for c in coords]
        if not any(records for records, _ in found):
            return Audit(epochs, messages, note=_CUT)
        epochs, messages = epoch + 1, messages + sum(len(records) for records, _ in found)
        verdict = judge(epoch, program, found)
        if verdict is not None:
            return replace(verdict, epochs=epochs, messages=messages, note=_unsigned(verdict, signed))
    return Audit(epochs, messages)


def _signed(policy: Policy, coords: Sequence[Coord], folders: Mapping[Coord, Path]) -> dict[Coord, int]:
    """How many epochs each worker signed. Raises VerificationError where a transcript holds something else."""
    found: dict[Coord, int] = {}
    for first in (c for c in coords if c.party == 0):
        three = {p: replace(first, party=p) for p in range(PARTIES)}
        try:
            epochs = signed_epochs({p: folders[c] for p, c in three.items()}, policy, first)
        except VerificationError as error:
            raise VerificationError("transcripts", error.what, "have its domain hand it over again") from error
        found |= {c: epochs[p] for p, c in three.items()}
    return found


def _unsigned(verdict: Audit, signed: Mapping[Coord, int]) -> str:
    """What is to be said where a party that is named did not sign the epoch: it was cut short."""
    odd = [p for p in verdict.parties if any(c.party == p and n <= verdict.epoch for c, n in signed.items())]
    if not odd:
        return ""
    who = " and ".join(f"P{p}" for p in odd)
    return f"{who} signed nothing of this epoch: its record is the word of whoever handed the files over"


def _of_fleet(
    policy: Policy,
    seeds: Mapping[Coord, Seeds],
    folders: Mapping[Coord, Path],
    signed: Mapping[Coord, int],
    sealed: Path,
) -> Audit:
    """:func:`audit` of a run with several workers or microbatches per party."""
    job = PrivateJob.from_json(policy.job)
    if job.task != "train" or job.start is not None:
        raise ConfigError("only a training from its beginning can be replayed", "run the same job from its beginning")
    pods = {(c.party, c.replica): c for c in seeds}
    opened = {pod: seeds[c].inputs(_sealed_for(sealed, *pod), policy) for pod, c in pods.items()}
    inputs = {c: opened[c.party, c.replica] for c in seeds}
    epochs = messages = 0
    with contextlib.closing(replay_fleet(policy, seeds, inputs)) as replayed:
        for epoch, program in enumerate(replayed):
            found = {c: recorded(folders[c], epoch) for c in seeds}
            if not any(records for records, _ in found.values()):
                return Audit(epochs, messages, note=_CUT)
            epochs, messages = epoch + 1, messages + sum(len(records) for records, _ in found.values())
            verdict = judge_fleet(epoch, program, found)
            if verdict is not None:
                return replace(verdict, epochs=epochs, messages=messages, note=_unsigned(verdict, signed))
    return Audit(epochs, messages)


def judge_fleet(
    epoch: int, program: Mapping[Coord, Timed], found: Mapping[Coord, tuple[LeafRecords, bool]]
) -> Audit | None:
    """:func:`judge` over all workers: of each party the first difference counts, in the order of the replay's clock."""
    first: dict[int, tuple[Coord, Leaf]] = {}
    for party in range(PARTIES):
        ordered = sorted((at, c, record) for c, timed in program.items() if c.party == party for at, record in timed)
        known: dict[Coord, set[Key]] = {c: set() for c in program if c.party == party}
        for _, c, record in ordered:
            leaf, (records, whole) = Leaf.unpack(record), found[c]
            known[c].add(leaf.key)
            if records.get(leaf.key, None if whole else record) != record:
                first[party] = (c, leaf)
                break
        else:
            for c, keys in known.items():
                records = found[c][0]
                if extra := records.keys() - keys:
                    first.setdefault(party, (c, Leaf.unpack(records[min(extra)])))
    guilty = [p for p, (_, leaf) in first.items() if leaf.direction == SENT]
    if guilty:
        c, leaf = first[guilty[0]]
        return Audit(0, 0, tuple(guilty), epoch, f"{leaf.name} of {c} is not what the program sends there")
    senders = {party: replace(c, party=leaf.src) for party, (c, leaf) in first.items()}
    for party in sorted(first, key=lambda party: not _sent_as_computed(first[party][1], found[senders[party]][0])):
        c, leaf = first[party]
        ends = tuple(sorted((leaf.src, leaf.dst)))
        return Audit(0, 0, ends, epoch, f"{leaf.name} of {c} is not what its sender recorded")
    return None


def _sealed_for(sealed: Path, party: int, replica: int) -> bytes:
    """A pod's file; of what was sealed to all pods of a party at once, the party's."""
    own = sealed_name(party, replica)
    return _only(sealed, own if any(sealed.rglob(own)) else sealed_name(party))


def _only(root: Path, name: str) -> bytes:
    found = sorted(root.rglob(name))
    if len(found) != 1:
        raise UnreadableError(f"{len(found)} files {name} under {root}", "collect one run, whose job reveals seeds")
    return reading.read_file(found[0], reading.LARGEST)


def main(argv: Sequence[str] | None = None) -> int:
    """``uvcc-engine audit``: exit 0 if every party kept to the program, 1 if one strayed, 2 if it cannot be told."""
    parser = RaisingParser(prog="uvcc-engine audit", description="Replay a run from its parties' seeds.")
    parser.add_argument("run", type=Path, help="folder with the run's policy, transcripts and seeds")
    parser.add_argument("--owner", type=Path, required=True, help="folder of the owner's key pair")
    parser.add_argument("--sealed", type=Path, required=True, help="folder with the sealed inputs (sealed-p0.bin, ...)")
    parser.add_argument("--policy", type=Path, help="the policy (default: policy.json in RUN)")
    parser.add_argument("--base", type=Path, help="the file of the job's public base, if it has one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        found = audit(args.run, Identity.load(args.owner), args.sealed, args.policy, args.base)
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(found) | {"ok": not found.parties}) if args.json else clean_block(found.text()))
    return 1 if found.parties else 0
