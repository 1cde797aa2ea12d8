"""A domain's signs of life to the other domains: where its conductor is, signed with the domain's key.

They say nothing that an outcome depends on; barriers do. They are how a domain that vanished is told from a slow one,
and what the other consoles show. ``number`` only grows: an older report that is shown again is no sign of life.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing import strict
from uvcc_engine.transcript.formats.reading import parse_json
from uvcc_engine.transcript.signed import orders
from uvcc_engine.transcript.signed.roster import MOST_ATTEMPTS
from uvcc_engine.transcript.terms.proposal import Proposal

REPORT_NAMESPACE: Final = "uvcc-report"
_TYPE: Final = "report"
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_WORD: Final = re.compile(r"[a-z][a-z-]{0,39}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainReport:
    """What a domain's conductor is at. ``step`` of ``steps`` in a phase, -1 of 0 before."""

    proposal: str
    attempt: int
    party: int
    number: int
    stage: str
    status: str
    step: int = -1
    steps: int = 0

    def __post_init__(self) -> None:
        if not _HASH.fullmatch(self.proposal) or self.party not in range(PARTIES):
            raise ConfigError("a report that names no proposal or no party", "64 hex digits; 0, 1 or 2")
        if not 0 <= self.attempt < MOST_ATTEMPTS or not 0 <= self.number < 1 << 53:
            raise ConfigError(f"a report of attempt {self.attempt}, number {self.number}", "whole numbers from 0")
        if not _WORD.fullmatch(self.stage) or not _WORD.fullmatch(self.status):
            raise ConfigError("a report of no stage", "lower-case letters and -")
        if not -1 <= self.step < 1 << 32 or not 0 <= self.steps < 1 << 32:
            raise ConfigError(f"a report of step {self.step} of {self.steps}", "whole numbers")


def signed(report: DomainReport, sign: Callable[[bytes], str]) -> str:
    """The report with its signature. ``sign`` signs under ``REPORT_NAMESPACE``."""
    return orders.sealed({"type": _TYPE, **asdict(report)}, sign)


def newest(proposal: Proposal, bodies: Iterable[str]) -> dict[int, DomainReport]:
    """The newest report of each domain, whatever its attempt; what a domain did not sign is passed over. Pure."""
    found: dict[int, DomainReport] = {}
    for body in bodies:
        try:
            content = parse_json(body.encode(), "a report")["content"]
            party = content["party"]
            named = content["type"] == _TYPE and content["proposal"] == proposal.id
        except (UnreadableError, KeyError, TypeError, ValueError):
            continue
        if not named or not isinstance(party, int) or party not in range(PARTIES):
            continue
        report = _opened(body, proposal.domains[party])
        if report is None or report.party != party:
            continue
        before = found.get(party)
        if before is None or (before.attempt, before.number) < (report.attempt, report.number):
            found[party] = report
    return found


def _opened(body: str, key: str) -> DomainReport | None:
    content = orders.opened(body, REPORT_NAMESPACE, [key])
    if content is None:
        return None
    fields: Mapping[str, Any] = {k: v for k, v in content.items() if k != "type"}
    try:
        return strict.read(DomainReport, fields, "a report")
    except ConfigError:
        return None
