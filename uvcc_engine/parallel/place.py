"""Where a rank stands in its party's world, where that world meets, and which device of a pod it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import Coord, Topology


@dataclass(frozen=True, slots=True)
class RankAddress:
    """One rank of a party's world and the address of its store (``MASTER_ADDR``, ``MASTER_PORT``)."""

    coord: Coord
    topology: Topology
    address: str = ""
    port: int = 0

    @classmethod
    def of(cls, coord: Coord, topology: Topology, env: Mapping[str, str]) -> RankAddress:
        """Read the meeting place from the environment. Raises ConfigError if a larger world has none."""
        if topology.workers_per_party == 1:
            return cls(coord, topology)
        try:
            rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
            found = cls(coord, topology, env["MASTER_ADDR"], int(env["MASTER_PORT"]))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{coord} has {topology.workers_per_party - 1} sister ranks, but no address to meet them: {error}",
                "launch it through the console, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
            ) from error
        if (rank, world) != (found.rank, found.world):
            raise ConfigError(f"{coord} is rank {found.rank} of {found.world}, the environment says {rank} of {world}")
        return found

    @property
    def rank(self) -> int:
        return self.topology.local_rank(self.coord)

    @property
    def world(self) -> int:
        return self.topology.workers_per_party

    def members(self, dimension: str) -> list[int]:
        """Ranks of this rank's group along a dimension, in order."""
        c, t = self.coord, self.topology
        along = {
            "dp": [Coord(r, c.party, c.stage, c.tensor) for r in range(t.replicas)],
            "pp": [Coord(c.replica, c.party, s, c.tensor) for s in range(t.stages)],
            "tp": [Coord(c.replica, c.party, c.stage, k) for k in range(t.tensor)],
        }
        return [t.local_rank(member) for member in along[dimension]]

    def index(self, dimension: str) -> int:
        """This rank's place in that group."""
        c = self.coord
        return {"dp": c.replica, "pp": c.stage, "tp": c.tensor}[dimension]


def has_own_devices(capacity: int, topology: Topology) -> bool:
    """Whether the ranks of every communicator can have devices of their own among a pod's ``capacity``."""
    return capacity >= max(topology.replicas, topology.stages, topology.tensor)


def device_slot(coord: Coord, capacity: int, topology: Topology) -> int:
    """Which of a pod's ``capacity`` devices a rank uses.

    Each has its own where there are enough; else it is (r + s + t) mod capacity, which gives the members of one
    communicator different ones as long as there are that many (:func:`has_own_devices`).
    """
    if capacity >= topology.workers_per_party:
        return topology.local_rank(coord)
    return (coord.replica + coord.stage + coord.tensor) % capacity
