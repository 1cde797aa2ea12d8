"""The triage ladder for a data-parallel run that hangs or times out: one change at a time, each from a checkpoint.

Order and values are those of the operators' sheet: compression off with large buckets; then one graph control at a
time; then NCCL's own words for one short window; then a single GPU, so that the run goes on at all. A rung says the
whole environment that it means, so going to the next also takes back what was only to be tried alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from uvcc_console.core.snapshot import Snapshot

_CALM: Final = {"NSA_DDP_COMPRESS": "off", "NSA_DDP_BUCKET_MB": "100"}
_LOUD: Final = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
KINDS: Final = ("lm", "command")


@dataclass(frozen=True, slots=True)
class Rung:
    """One change. ``env`` is added to the workers' environment; ``window``: for one attempt only."""

    word: str
    change: str
    why: str
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    single: bool = False
    window: bool = False


LADDER: Final = (
    Rung("calm", "compression off, buckets of 100 MB", "fewer and plainer collectives", MappingProxyType(_CALM)),
    Rung(
        "dynamic",
        "static graph off",
        "the graph may change between steps",
        MappingProxyType({**_CALM, "NSA_DDP_STATIC_GRAPH": "0", "NSA_DDP_FIND_UNUSED": "0"}),
    ),
    Rung(
        "unused",
        "find unused parameters, static graph on again",
        "a parameter may get no gradient on one rank",
        MappingProxyType({**_CALM, "NSA_DDP_STATIC_GRAPH": "1", "NSA_DDP_FIND_UNUSED": "1"}),
    ),
    Rung(
        "loud",
        "NCCL debug for one short window",
        "its log names the rank and the collective",
        MappingProxyType({**_CALM, **_LOUD}),
        window=True,
    ),
    Rung("single", "a single GPU", "slow, but without collectives there is nothing to hang in", single=True),
)
BY_WORD: Final = {rung.word: rung for rung in LADDER}


def tried(s: Snapshot) -> list[str]:
    """Words of the rungs that were tried, in order."""
    return [t.rung for t in s.triage]


def propose(s: Snapshot) -> Rung | None:
    """The next single change; None when all were tried."""
    known = set(tried(s))
    return next((rung for rung in LADDER if rung.word not in known), None)


def impossible(s: Snapshot) -> str:
    """Why triage makes no sense for this run now; empty when it does."""
    if s.job_kind not in KINDS:
        return f"the triage ladder is for data-parallel jobs; a {s.job_kind or 'planned'} run's job is signed as it is"
    if s.phase == "" or not s.engine_run:
        return "nothing was started yet"
    return "" if propose(s) else "every change of the ladder was tried: " + ", ".join(tried(s))


def story(s: Snapshot) -> list[str]:
    """What was tried and what it did, one line each."""
    return [
        f"{BY_WORD[t.rung].change if t.rung in BY_WORD else t.rung}, from step {t.step}: {t.outcome or 'runs'}"
        for t in s.triage
    ]
