"""What one worker process is to do, as the console sends it and the agent hands it over. Standard library only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files.files import checked_run_id

KINDS: Final = ("private", "lm", "command", "preflight", "handover")
LM_SEED: Final = 1337
"""The seed of a language model's job that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker of one engine run on one pod.

    ``dir`` is the run directory ("" = the agent's ``runs/<run>``); ``identity_dir``, ``policy``, ``signatures`` and
    ``inputs`` are paths on the pod ("" where the kind of job has none), relative ones from the agent's root. ``link``
    says how parties reach each other. ``lead`` marks the worker that writes ``training.csv`` and ``exit.json`` of a
    directory that several share. ``env`` is added to the environment; ``argv`` is the command of kind "command".
    ``start``: the operator's decision to go on from the checkpoint of exactly this step, and not from the newest (-1);
    later ones are set aside.
    """

    run: str
    kind: str
    coord: str
    topology: Topology = field(default_factory=Topology)
    job: dict[str, Any] = field(default_factory=dict)
    dir: str = ""
    identity_dir: str = ""
    policy: str = ""
    signatures: str = ""
    inputs: str = ""
    link: LinkSpec = field(default_factory=LinkSpec)
    resume: bool = False
    attempt: int = 0
    lead: bool = True
    env: dict[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    start: int = -1

    def __post_init__(self) -> None:
        checked_run_id(self.run)
        Coord.parse(self.coord)
        if self.kind not in KINDS:
            raise ConfigError(f"unknown kind of worker {self.kind!r}", f"one of {', '.join(KINDS)}")
        if self.kind == "command" and not self.argv:
            raise ConfigError("a command worker without argv", "give the command to run")

    @property
    def rank(self) -> int:
        """Rank inside the party's world, which names the heartbeat file."""
        return self.topology.local_rank(Coord.parse(self.coord))

    @property
    def world(self) -> int:
        """Number of ranks in the party's world."""
        return self.topology.workers_per_party

    def to_json(self) -> dict[str, Any]:
        """Its fields; ``start`` only where it says something: pods that an older console prepared do not know it."""
        found = dataclasses.asdict(self) | {"link": self.link.to_json()}
        if self.start < 0:
            del found["start"]
        return found

    @classmethod
    def from_json(cls, data: object) -> WorkerSpec:
        """Strict: raises ConfigError naming an unknown key and the nearest known one, or a value of a wrong type."""
        return strict.read(cls, data, "a worker spec")
