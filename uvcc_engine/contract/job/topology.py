"""Coordinates of a fleet: R replicas x 3 parties x S stages x T tensor ranks. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from uvcc_engine.contract.errors import ConfigError

PARTIES = 3
AXES = ("dp", "pp", "tp")  # of a party's mesh: replicas, stages, tensor ranks
# what the ids of sessions can carry
MOST = {"replicas": 65_536, "stages": 255, "tensor": 65_535, "microbatches": 65_536}
# what a profile may ask for: a typing error beyond it would rent hundreds of pods
MOST_OF_PROFILE = {"replicas": 64, "stages": 64, "tensor": 64, "microbatches": 1024}


@dataclass(frozen=True, order=True, slots=True)
class Coord:
    """One worker: replica, party, stage, tensor rank."""

    replica: int
    party: int
    stage: int
    tensor: int

    def __str__(self) -> str:
        return f"p{self.party}r{self.replica}s{self.stage}t{self.tensor}"

    @classmethod
    def parse(cls, text: str) -> Coord:
        """Read ``p0r1s2t3``: no worker has a second spelling. Raises ConfigError on anything else."""
        import re

        found = re.fullmatch("p{0}r{0}s{0}t{0}".format("(0|[1-9][0-9]{0,5})"), text)
        if not found:
            raise ConfigError(f"not a worker coordinate: {text[:80]!r}", "write it like p0r1s0t0")
        p, r, s, t = (int(g) for g in found.groups())
        return cls(r, p, s, t)


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the parallel dimensions. ``microbatches`` is the M of the pipeline schedule."""

    replicas: int = 1
    stages: int = 1
    tensor: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            if getattr(self, name) < 1:
                raise ConfigError(f"topology.{name} is {getattr(self, name)}", "it must be at least 1")
            if getattr(self, name) > most:
                raise ConfigError(f"topology.{name} is {getattr(self, name)}", f"it must be at most {most}")

    @property
    def workers_per_party(self) -> int:
        return self.replicas * self.stages * self.tensor

    @property
    def workers(self) -> int:
        return PARTIES * self.workers_per_party

    def local_rank(self, coord: Coord) -> int:
        """Rank inside the party's world: (r*S + s)*T + t, the order of DeviceMesh ("dp", "pp", "tp")."""
        return (coord.replica * self.stages + coord.stage) * self.tensor + coord.tensor

    def coords(self) -> Iterator[Coord]:
        """All workers, interleaved over parties so that no party starts far behind another."""
        for r in range(self.replicas):
            for s in range(self.stages):
                for t in range(self.tensor):
                    for p in range(PARTIES):
                        yield Coord(r, p, s, t)
