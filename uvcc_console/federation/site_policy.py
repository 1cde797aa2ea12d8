"""What a domain lets be done with its pods: ``policy.yaml`` beside its key, and its pure evaluation.

A proposal outside it is refused by name without asking anybody. Inside it a person approves; ``yes_for`` names the
coordinators to whose proposals ``--yes`` may say so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.private_job import DEFAULTS
from uvcc_engine.contract.parsing import strict
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.terms.proposal import EVERYBODY, Proposal

FILE: Final = "policy.yaml"
LAYERS: Final = "layers"
"""Under ``models``: any model that is a list of layers, or came from a module."""
_LARGEST: Final = 64 * reading.KIB
_HOUR: Final = 3600.0

DEFAULT_TEXT: Final = """\
# What this domain lets be done with its pods. A proposal outside it is refused without asking; inside it a person
# approves. An absent list means anybody or anything; an empty one nobody or nothing. Keys are the first line that
# `uvcc domain show` prints.

# coordinators: ["ssh-ed25519 AAAA..."]     # whose proposals are looked at
# owners: ["ssh-ed25519 AAAA..."]           # whose data may be trained on
# models: [mlp-digits, layers]              # by name; layers: any list of layers
# code: [SHA256]                            # of the engine's wheel
reveal: [loss, accuracy]                    # what may be opened to everybody
reveal_to_owner: [weights, predictions]     # what may be sealed to the data owner
min_batch: 16                               # rows that a step's revealed loss is of, at least
min_rows: 30                                # rows that every other revealed number is of, at least
max_hourly: 0.0                             # dollars, of this domain's own account; 0: nothing may be spent
max_total: 0.0
max_hours: 12.0                             # a run's longest life
hours: [0, 24]                              # of the day, UTC, in which proposals are approved
yes_for: []                                 # coordinators to whose proposals --yes may say yes
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePolicy:
    """See ``DEFAULT_TEXT``; None stands for a list that is absent."""

    coordinators: tuple[str, ...] | None = None
    owners: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    code: tuple[str, ...] | None = None
    reveal: tuple[str, ...] = ("loss", "accuracy")
    reveal_to_owner: tuple[str, ...] = ("weights", "predictions")
    min_batch: int = 16
    min_rows: int = 30
    max_hourly: float = 0.0
    max_total: float = 0.0
    max_hours: float = 12.0
    hours: tuple[int, int] = (0, 24)
    yes_for: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        begin, end = self.hours
        if not 0 <= begin < end <= 24:
            raise ConfigError(f"hours: [{begin}, {end}] is no part of a day", "two whole hours, like [8, 20]")
        if min(self.min_batch, self.min_rows, self.max_hourly, self.max_total, self.max_hours) < 0:
            raise ConfigError("a site policy has no negative numbers")


@dataclass(frozen=True, slots=True)
class SiteJudgement:
    """``refused``: each rule that the proposal breaks, with why; ``yes``: whether ``--yes`` may approve it."""

    refused: tuple[tuple[str, str], ...]
    yes: bool


def load(path: Path) -> SitePolicy:
    """A site policy; strict. Raises UnreadableError, ConfigError naming the key and the nearest known one."""
    import yaml

    from uvcc_engine.contract.parsing import yaml_text

    try:
        data = yaml_text.load(reading.read_text(path, _LARGEST, named=True))
    except yaml.YAMLError as e:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(e).split())[:200]}") from e
    except RecursionError as e:
        raise UnreadableError(f"{path} is nested too deeply") from e
    return strict.read(SitePolicy, {} if data is None else data, str(path.name))


def evaluate(proposal: Proposal, site: SitePolicy, domain: str, now: float) -> SiteJudgement:
    """Judge a proposal for the domain of this key. Pure."""
    refused = (
        *_people(proposal, site, domain),
        *_job(proposal, site),
        *_revealed(proposal, site),
        *_spending(proposal, site),
        *_times(proposal, site, now),
    )
    return SiteJudgement(refused, not refused and proposal.coordinator in site.yes_for)


_Broken = Iterator[tuple[str, str]]


def _people(p: Proposal, site: SitePolicy, domain: str) -> _Broken:
    if domain not in p.domains:
        yield "domains", "it does not name this domain"
    if site.coordinators is not None and p.coordinator not in site.coordinators:
        yield "coordinators", f"{p.coordinator} is none of ours"
    for owner in p.owners:
        if site.owners is not None and owner not in site.owners:
            yield "owners", f"{owner} is none of ours"


def _job(p: Proposal, site: SitePolicy) -> _Broken:
    if site.code is not None and p.code_hash not in site.code:
        yield "code", f"{p.code_hash} is not approved here"
    model = p.job.get("model")
    name = model if isinstance(model, str) else LAYERS
    if site.models is not None and name not in site.models:
        yield "models", f"{name} is not approved here"


def _revealed(p: Proposal, site: SitePolicy) -> _Broken:
    told = {r.value.partition(".")[0] for r in p.reveal if r.to == EVERYBODY}
    if more := sorted(told - set(site.reveal)):
        yield "reveal", f"{', '.join(more)} to everybody"
    if more := sorted({r.value for r in p.reveal if r.to != EVERYBODY} - set(site.reveal_to_owner)):
        yield "reveal_to_owner", f"{', '.join(more)} to the owner"
    if stated := sorted({str(v) for v in _listed(p.job)} - {r.value.partition(".")[0] for r in p.reveal}):
        yield "reveal", f"the job opens {', '.join(stated)}, which the proposal does not list"
    if "loss" in told and _number(p.job, "batch") < site.min_batch:
        yield "min_batch", f"the loss of {_number(p.job, 'batch'):g} rows"
    rows = max(_number(p.job, "min_rows"), _number(p.job, "test_rows"))
    if told - {"loss"} and rows < site.min_rows:
        yield "min_rows", f"numbers of {rows:g} rows"


def _spending(p: Proposal, site: SitePolicy) -> _Broken:
    if p.limits.hourly > site.max_hourly:
        yield "max_hourly", f"{p.limits.hourly:.2f} $/h"
    if p.limits.total > site.max_total:
        yield "max_total", f"{p.limits.total:.2f} $"
    if p.limits.ttl_s > site.max_hours * _HOUR:
        yield "max_hours", f"{p.limits.ttl_s / _HOUR:g} h"


def _times(p: Proposal, site: SitePolicy, now: float) -> _Broken:
    if now >= p.expires:
        then, here = (time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(t)) for t in (p.expires, now))
        yield "expires", f"it expired at {then}; by this machine's clock it is {here}"
    begin, end = site.hours
    hour = time.gmtime(now).tm_hour
    if not begin <= hour < end:
        yield "hours", f"it is {hour} h UTC"


def _listed(job: Mapping[str, Any]) -> list[Any]:
    """What the job opens; where it says nothing, its workers take the default, and so does this."""
    found = job.get("reveal", list(DEFAULTS.reveal))
    return found if isinstance(found, list) else [found]


def _number(job: Mapping[str, Any], key: str) -> float:
    """A size of the job; what is no number counts as none."""
    value = job.get(key)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else 0.0
