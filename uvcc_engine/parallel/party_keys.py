"""Who may join a party's world: its pods, by their pinned identities; and when a world needs them.

Shares of one party cross between its own pods. On one machine they stay in it; beyond it every connection is sealed
between the identities of the two pods, which the signed policy names, and no world meets there without them.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.plane.secure_session import SigningIdentity
from uvcc_engine.transcript.signing.identity import PublicIdentity


@dataclass(frozen=True, slots=True)
class PartyKeys:
    """What a rank needs to prove itself to its sister ranks, and they to it.

    ``identity``: of this rank's pod. ``pods``: the public identities of the party's pods, by replica. ``world``: 32
    bytes that no other job or party has; every key is bound to them. ``ranks_per_pod``: S x T.
    """

    identity: SigningIdentity
    pods: tuple[PublicIdentity, ...]
    world: bytes
    ranks_per_pod: int
    _knocks: dict[int, bytes] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, identity: SigningIdentity, pods: Sequence[PublicIdentity], sid_job: bytes, party: int, topology: Topology
    ) -> PartyKeys:
        """The keys of one party's pods in the job ``sid_job``. Raises ConfigError unless there is one per replica."""
        if len(pods) != topology.replicas:
            raise ConfigError(f"{len(pods)} identities for {topology.replicas} pods of P{party}", "one per replica")
        world = hashlib.sha256(b"UVCC_PARTY_WORLD_V1" + sid_job + bytes([party])).digest()
        return cls(identity, tuple(pods), world, topology.stages * topology.tensor)

    @property
    def ranks(self) -> int:
        """How many ranks the world has."""
        return len(self.pods) * self.ranks_per_pod

    def pod_of(self, rank: int) -> PublicIdentity | None:
        """The identity of the pod that a rank runs on; None for a rank that there is not."""
        return self.pods[rank // self.ranks_per_pod] if 0 <= rank < self.ranks else None

    def rank_to_show(self, rank: int) -> int:
        """``rank``, or where this pod's identity is that of another pod of the party, a rank of that one."""
        if self.pod_of(rank) == self.identity.public or self.identity.public not in self.pods:
            return rank
        return self.pods.index(self.identity.public) * self.ranks_per_pod

    def knock_key(self, rank: int) -> bytes:
        """What only this pod and that of ``rank`` can compute; an agreement of keys once per pod."""
        replica = rank // self.ranks_per_pod
        if replica not in self._knocks:
            self._knocks[replica] = self.identity.pair_secret(self.pods[replica], self.world, "party-knock")
        return self._knocks[replica]


def stays_here(address: str) -> bool:
    """Whether what goes to ``address`` cannot leave this machine: a loopback address, or ``localhost``.

    Another name is not: who answers for names decides where it leads.
    """
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False
