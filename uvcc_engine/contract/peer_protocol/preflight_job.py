"""A rehearsal of a run's network: what its ranks are asked to measure, and what each of them leaves behind.

A report comes from a pod: :meth:`PreflightReport.parse` answers for every JSON value there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import AXES, Coord
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.untrusted import as_float, as_int, scalar_text
from uvcc_engine.contract.peer_protocol.peer_messages import PairFigures
from uvcc_engine.contract.run_files.records import Malformed

PATTERN: Final = "preflight_*.json"
DEVICES: Final = ("cpu", "cuda", "auto")
MOST_MIB: Final = 4096.0
MOST_S: Final = 86_400.0
_MOST_TROUBLE: Final = 16  # parts that may fail
_MOST: Final = 1e12  # of a measured figure


def report_name(coord: str) -> str:
    """The file of the run directory that the rank at ``coord`` leaves."""
    return PATTERN.replace("*", coord)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightJob:
    """What is measured: blocks of ``reduce_mib`` MiB in a group and ``pair_mib`` MiB between parties.

    ``timeout_s``: seconds for the ranks to meet. ``peers``: public identities by party, empty where the run has one
    party. ``pods``: those of the party's own pods, by replica, for what crosses between them. Raises ConfigError for a
    size, a time or a device that is none.
    """

    timeout_s: float
    reduce_mib: float
    pair_mib: float
    device: str = "cpu"
    peers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pods: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= MOST_S:
            raise ConfigError(f"job.timeout_s is {self.timeout_s}", f"more than 0, at most {MOST_S:.0f} seconds")
        for name in ("reduce_mib", "pair_mib"):
            if not 0 < getattr(self, name) <= MOST_MIB:
                raise ConfigError(f"job.{name} is {getattr(self, name)}", f"more than 0, at most {MOST_MIB:.0f} MiB")
        if self.device not in DEVICES:
            raise ConfigError(f"job.device is {self.device[:80]!r}", f"one of {', '.join(DEVICES)}")

    @classmethod
    def from_json(cls, data: object) -> PreflightJob:
        """Raises ConfigError naming the key that is unknown, missing or of another type."""
        return strict.read(cls, data, "job")

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k not in ("peers", "pods") or v}


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """An all-reduce in a group of ``size`` ranks: the best time in ms, and what each rank sent in MiB/s."""

    size: int
    ms: float
    mib_s: float


@dataclass(frozen=True, slots=True)
class PreflightTrouble:
    """A part of the rehearsal that failed, what of it, and a hint what to do."""

    part: str
    what: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    """What one rank measured: by group, by peer party, and what failed. ``backend``: of its process groups."""

    run: str
    coord: str
    backend: str = ""
    groups: Mapping[str, GroupFigures] = field(default_factory=dict)
    pairs: Mapping[int, PairFigures] = field(default_factory=dict)
    trouble: tuple[PreflightTrouble, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, data: object) -> PreflightReport | Malformed:
        """The report that a JSON value holds. Total."""
        if not isinstance(data, Mapping):
            return Malformed("a report that is no object")
        coord, trouble = data.get("coord"), data.get("trouble")
        groups, pairs = data.get("groups"), data.get("pairs")
        if not isinstance(coord, str) or not isinstance(groups, Mapping) or not isinstance(pairs, Mapping):
            return Malformed("a report of nothing")
        if not isinstance(trouble, list) or len(trouble) > _MOST_TROUBLE:
            return Malformed("a report without a list of what failed")
        if any(not isinstance(t, Mapping) for t in trouble):
            return Malformed("a report of a failure that is none")
        try:
            where = str(Coord.parse(coord))
        except ConfigError:
            return Malformed("a report of no rank")
        measured = {name: _group(found) for name, found in groups.items()}
        between = {peer: PairFigures.of(found) for peer, found in pairs.items()}
        if not set(groups) <= set(AXES) or any(isinstance(f, Malformed) for f in measured.values()):
            return Malformed("a report with malformed figures of its groups")
        if not set(pairs) <= set("012") or any(isinstance(f, Malformed) for f in between.values()):
            return Malformed("a report with malformed figures of its peers")
        return cls(
            run=scalar_text(data.get("run")),
            coord=where,
            backend=scalar_text(data.get("backend"), 32),
            groups={n: f for n, f in measured.items() if isinstance(f, GroupFigures)},
            pairs={int(p): f for p, f in between.items() if isinstance(f, PairFigures)},
            trouble=tuple(
                PreflightTrouble(
                    scalar_text(t.get("part"), 64), scalar_text(t.get("what"), 500), scalar_text(t.get("hint"), 500)
                )
                for t in trouble
            ),
        )


def _group(found: object) -> GroupFigures | Malformed:
    told = found if isinstance(found, Mapping) else {}
    size, ms, mib_s = (
        as_int(told.get("size"), 2),
        as_float(told.get("ms"), 0.0, _MOST),
        as_float(told.get("mib_s"), 0.0, _MOST),
    )
    if size is None or ms is None or mib_s is None:
        return Malformed("malformed figures of a group")
    return GroupFigures(size, ms, mib_s)
