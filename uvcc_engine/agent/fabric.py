"""Kind "preflight": the ranks of a run before the run. They meet in the groups and over the links that it will use.

Each rank joins its party's process groups and adds up a block of known numbers in each, timed; the first rank of each
replica then talks to those of the other parties over the plane: round trips, and a block each way. What was measured,
or what failed and its hint, is left in ``preflight_<coord>.json`` of the run directory. No data of a job is touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch

from uvcc_engine.contract.errors import ProtocolError, UvccError, VerificationError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.peer_protocol.peer_messages import PairFigures
from uvcc_engine.contract.peer_protocol.preflight_job import (
    GroupFigures,
    PreflightJob,
    PreflightReport,
    PreflightTrouble,
    report_name,
)
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.parallel import own_gpu
from uvcc_engine.parallel.group import Communicator
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.party_keys import PartyKeys
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.plane.api import Plane, Tag
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity

MIB: Final = 1 << 20
REPEATS: Final = 3
PINGS: Final = 5


def main(spec: WorkerSpec) -> int:
    """Measure and report; returns 0 even where something failed: the report says so.

    ``spec.job`` is a :class:`PreflightJob`. Raises ConfigError where it is none.
    """
    coord, job = Coord.parse(spec.coord), PreflightJob.from_json(spec.job)
    trouble: list[PreflightTrouble] = []
    groups: dict[str, GroupFigures] = {}
    pairs: dict[int, PairFigures] = {}
    facts: dict[str, str] = {}

    @contextmanager
    def attempt(part: str) -> Iterator[None]:
        """What fails is written down; the rest is tried all the same."""
        try:
            yield
        except UvccError as error:
            trouble.append(PreflightTrouble(part, error.what, error.hint))

    with attempt("groups"):
        keys = party_keys(spec, coord, job)
        groups = measure_groups(RankAddress.of(coord, spec.topology, os.environ), job, facts, keys)
    if job.peers and (coord.stage, coord.tensor) == (0, 0):
        with attempt("pairs"):
            pairs = measure_pairs(spec, coord, job, attempt)
    backend = facts.get("backend", "")
    report = PreflightReport(
        run=spec.run, coord=spec.coord, backend=backend, groups=groups, pairs=pairs, trouble=tuple(trouble)
    )
    files.write_json(Path(spec.dir) / report_name(spec.coord), report.to_json())
    return 0


# -- inside a party --------------------------------------------------------------------------------------------------


def party_keys(spec: WorkerSpec, coord: Coord, job: PreflightJob) -> PartyKeys | None:
    """What this rank proves itself to its sister ranks with; None where nobody told who they are.

    Raises UvccError for an identity that cannot be read, ConfigError for a list that does not fit the topology.
    """
    if not job.pods:
        return None
    pods = [PublicIdentity.from_json(pod) for pod in job.pods]
    return PartyKeys.of(Identity.load(Path(spec.identity_dir)), pods, _sid_job(spec), coord.party, spec.topology)


def _sid_job(spec: WorkerSpec) -> bytes:
    return hashlib.sha256(b"UVCC_PREFLIGHT_V1" + spec.run.encode()).digest()


def measure_groups(
    place: RankAddress, job: PreflightJob, facts: dict[str, str], keys: PartyKeys | None = None
) -> dict[str, GroupFigures]:
    """An all-reduce in each group of this rank, by ``dp``, ``pp``, ``tp``; empty for a party of one rank.

    ``facts`` learns the ``backend``, also where the ranks do not add up. ``keys``: see ``PartyGroups.open``.
    ``mib_s`` is the bus bandwidth: what each rank sends in a ring, 2(n-1)/n of the block, over the best time.
    Raises PeerLostError if the ranks do not meet, VerificationError if they do not add up.
    """
    secret = job.device != "cpu" and bool(job.peers)  # those of a language model have torch's own groups
    carried = own_gpu.claim(place) if secret else job.device
    device = device_of(job.device)
    groups = PartyGroups.open(
        place,
        on_event=lambda name, fields: None,
        device="cpu" if carried == "cpu" else device.type,
        timeout_s=job.timeout_s,
        keys=keys,
    )
    facts["backend"] = groups.backend
    try:
        groups.start_dp()
        named = {"dp": groups.dp, "pp": groups.pp, "tp": groups.tp}
        found = {name: measure_reduction(g, device, job.reduce_mib) for name, g in named.items() if g.size > 1}
    finally:
        groups.close()
    return found


def device_of(wanted: str) -> torch.device:
    """What a rank measures from: its GPU, if it has any; the one that it claimed is the only one that it sees."""
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def measure_reduction(group: Communicator, device: torch.device, mib: float) -> GroupFigures:
    """All-reduces of ``mib`` MiB in ``group``, the best of some. Raises VerificationError if they do not add up."""
    count = max(1, int(mib * MIB) // 8)
    wanted, best = group.size * (group.size + 1) // 2, float("inf")
    for _ in range(REPEATS):
        block = torch.full((count,), group.index + 1, dtype=torch.int64, device=device)
        began = time.perf_counter()
        group.sum_(block)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
        if not bool((block == wanted).all()):
            what = f"the {group.name} group of {group.size} ranks does not add up"
            raise VerificationError("all_reduce", what, "replace the pod: its memory, network or GPU corrupts data")
    sent = 2 * (group.size - 1) / group.size * count * 8 / MIB
    return GroupFigures(group.size, round(1000 * best, 3), round(sent / best, 1))


# -- between parties -------------------------------------------------------------------------------------------------


def measure_pairs(
    spec: WorkerSpec, coord: Coord, job: PreflightJob, attempt: Callable[[str], AbstractContextManager[None]]
) -> dict[int, PairFigures]:
    """Round trip and bandwidth over the plane to both other parties, by party.

    The pairs take turns, in the same order everywhere, each inside ``attempt("pair N")``. A relay or broker that is
    away is waited for as long as a party is: by the plane's own patience, a quarter of an hour, whoever waits for the
    report would have given up before it said why. Raises UvccError where the link cannot be opened at all.
    """
    sid_job = _sid_job(spec)
    patience = job.timeout_s
    plane = open_plane(
        party=coord.party,
        coord=spec.coord,
        sid_sub=sid_of(sid_job, coord),
        identity=Identity.load(Path(spec.identity_dir)),
        peers={int(p): PublicIdentity.from_json(i) for p, i in job.peers.items()},
        link=spec.link.or_else(LinkSpec(peer_timeout_s=patience, first_contact_s=2 * patience, relay_s=2 * patience)),
        recorder=None,
        state_dir=Path(spec.dir) / "plane",
        on_event=lambda name, fields: None,
    )
    found: dict[int, PairFigures] = {}
    try:
        for a in range(PARTIES):
            for b in range(a + 1, PARTIES):
                if coord.party == a:
                    with attempt(f"pair {b}"):
                        found[b] = _lead(plane, b, job.pair_mib)
                elif coord.party == b:
                    with attempt(f"pair {a}"):
                        found[a] = _follow(plane, a)
        plane.close()
    finally:
        plane.close(graceful=False)
    return found


def _lead(plane: Plane, peer: int, mib: float) -> PairFigures:
    trips = []
    for _ in range(PINGS):
        began = time.perf_counter()
        plane.send_control(peer, b"ping")
        plane.recv_control(peer)
        trips.append(time.perf_counter() - began)
    block = bytes(max(1, int(mib * MIB)))
    began = time.perf_counter()
    plane.send(peer, Tag(0, 0, 0, kinds.OPEN), block)
    plane.recv_control(peer)  # it has it all
    out = time.perf_counter() - began
    began = time.perf_counter()
    plane.send_control(peer, str(len(block)).encode())
    plane.recv(peer, Tag(0, 0, 1, kinds.OPEN))
    back = time.perf_counter() - began
    rtt_ms = round(1000 * statistics.median(trips), 3)
    told = PairFigures(rtt_ms, round(len(block) / MIB / out, 2), round(len(block) / MIB / back, 2))
    plane.send_control(peer, json.dumps(asdict(told)).encode())
    return told


def _follow(plane: Plane, peer: int) -> PairFigures:
    """The other end of ``_lead``; what it measured, as seen from here."""
    for _ in range(PINGS):
        plane.recv_control(peer)
        plane.send_control(peer, b"pong")
    size = len(plane.recv(peer, Tag(0, 0, 0, kinds.OPEN)))
    plane.send_control(peer, b"have it")
    asked = plane.recv_control(peer)
    if asked != str(size).encode():  # as much as it sent itself, and no more
        raise ProtocolError(f"P{peer} asks for another block than it sent", party=peer)
    plane.send(peer, Tag(0, 0, 1, kinds.OPEN), bytes(size))
    told = PairFigures.parse(plane.recv_control(peer))
    if isinstance(told, Malformed):
        raise ProtocolError(f"P{peer} sent {told.why}", party=peer)
    return told.seen_from_the_other_end()
