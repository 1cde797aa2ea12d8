"""What the ranks of one party agree on among themselves, beside the protocol with the other parties.

Whatever is decided over the whole fleet is decided in two moves. First every worker compares notes with its two peers
in the other parties, as it would alone: afterwards the three workers of a (replica, stage, tensor) know the same
maximum of their three votes. Then the ranks of each party take the maximum of those. It runs over the same set of
votes, one of every worker in the fleet for this very step, in all three parties; so all workers decide the same.
"""

from __future__ import annotations

import hashlib
import json
import struct
import uuid
from collections.abc import Sequence
from typing import Final

import torch

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.peer_protocol.peer_messages import Vote
from uvcc_engine.parallel.group import Communicator
from uvcc_engine.parallel.groups import PartyGroups

_NONCE_BYTES: Final = 126
_SAVED: Final = struct.Struct("<q")


class Ranks:
    """One rank's conversation with its sister ranks. Alone, it agrees with itself."""

    def __init__(self, groups: PartyGroups) -> None:
        self.groups = groups
        place = groups.place
        c, t = place.coord, place.topology
        per_replica = t.stages * t.tensor
        self.pod = range(c.replica * per_replica, (c.replica + 1) * per_replica)
        """Ranks of this replica, which share a pod and its directory."""

    @property
    def leads_pod(self) -> bool:
        """Whether this rank writes what is written once per directory."""
        return self.groups.place.rank == self.pod.start

    def greatest(self, mine: Vote) -> Vote:
        """The largest vote of all ranks of this party, the same at each; among equals that of the largest nonce.

        Its ``saved`` is the smallest of all.
        """
        if self.groups.alone:
            return mine
        self.groups.start_dp()
        nonce = mine.nonce.encode()[:_NONCE_BYTES]
        found, saved = bytes([mine.vote, len(nonce)]) + nonce.ljust(_NONCE_BYTES, b"\0"), mine.saved
        for group in self._dimensions:
            told = _gathered(group, found + _SAVED.pack(saved))
            found = max((one[: -_SAVED.size] for one in told), key=lambda one: (one[0], one[2:]))
            saved = min(_SAVED.unpack(one[-_SAVED.size :])[0] for one in told)
        return Vote(found[0], found[2 : 2 + found[1]].decode(errors="replace"), saved)

    @property
    def _dimensions(self) -> tuple[Communicator, Communicator, Communicator]:
        return self.groups.tp, self.groups.pp, self.groups.dp

    def common(self, steps: set[int]) -> set[int]:
        """Checkpoint steps that all ranks of this party have. Works before any group is up."""
        told = self.groups.gather(json.dumps(sorted(steps)).encode())
        return set.intersection(*(set(json.loads(one)) for one in told))

    def of_first_replica(self, secret: bytes) -> bytes:
        """Some bytes of the first replica's rank of this stage and tensor slice, at every replica's."""
        if self.groups.dp.size == 1:
            return secret
        value = torch.frombuffer(bytearray(secret), dtype=torch.uint8).clone()
        return self.groups.dp.broadcast_(value, 0).numpy().tobytes()

    def whole_state(self, digests: Sequence[str]) -> list[str]:
        """The digests of the whole model's three components from those of this rank's part, the same at every rank.

        Raises ProtocolError if two replicas of this party hold different shares.
        """
        if self.groups.alone:
            return list(digests)
        self.groups.start_dp()
        mine = b"".join(bytes.fromhex(d) for d in digests)
        for replica, theirs in enumerate(_gathered(self.groups.dp, mine)):
            if theirs != mine:
                c = self.groups.place.coord
                raise ProtocolError(
                    f"replicas {c.replica} and {replica} of P{c.party} hold different final shares",
                    "one of them computed something else; compare their transcripts",
                    party=c.party,
                )
        by_stage = _gathered(self.groups.pp, b"".join(_gathered(self.groups.tp, mine)))
        parts = [row[i : i + len(mine)] for row in by_stage for i in range(0, len(row), len(mine))]
        if len(parts) == 1:
            return list(digests)
        wholes = []
        for component in range(len(digests)):
            state = hashlib.sha256(b"UVCC_WHOLE_STATE_V1" + struct.pack("<I", len(parts)))
            for part in parts:
                state.update(part[32 * component : 32 * component + 32])
            wholes.append(state.hexdigest())
        return wholes

    # -- checkpoints of a directory that several ranks share ---------------------------------------------------------

    def token(self) -> str:
        """A name for what the ranks of this pod write together from now on; call it before the training starts."""
        made = uuid.uuid4().hex[:12] if self.leads_pod else ""
        return self.groups.gather(made.encode(), self.pod)[0].decode()


def _gathered(group: Communicator, value: bytes) -> list[bytes]:
    """Every member's bytes; all give equally many."""
    if group.size == 1:
        return [value]
    tensor = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return [one.numpy().tobytes() for one in group.gather(tensor)]
