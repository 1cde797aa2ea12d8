"""One domain's part of a rollout that three domains approved: its own pods only, and the job that was proposed."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Final

from uvcc_console.plan.plan import FULL, LATER, SMOKE, Phase, Plan
from uvcc_console.plan.schema import ConsentPart
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.signed.barriers import DRILL, MEET, ROSTER, SHARES, stages_of
from uvcc_engine.transcript.terms.proposal import Proposal

_DROPPED: Final = LATER
"""Stages that one domain cannot do alone: all pods are rented at once."""
_BY_DOMAIN: Final = ("rounds",)
"""Keys of a job that follow from a provider: what was proposed holds."""


def of_domain(plan: Plan, proposal: Proposal, party: int) -> Plan:
    """The plan of one party's own conductor. Raises ConfigError where the profile is of another run than proposed."""
    full = plan.phases[FULL]
    if full.kind != "private" or full.topology != proposal.topology:
        raise ConfigError("the profile's topology is not the proposal's", "take the profile that was proposed")
    ours, theirs = dict(full.job), dict(proposal.job)
    keys = {*ours, *theirs} - {*_BY_DOMAIN}
    differs = sorted(k for k in keys if canonical(ours.get(k)) != canonical(theirs.get(k)))
    if differs:
        what = f"the profile's job is not the proposal's: {', '.join(differs)}"
        raise ConfigError(what, "take the profile that was proposed, with the same --set")
    if plan.profile.limits.resumes:
        raise ConfigError("limits.resumes: of a run of three domains none goes on alone", "give limits.resumes 0")
    if plan.profile.link not in ("auto", "direct"):
        raise ConfigError(f"link {plan.profile.link!r} between domains", "pods of three domains meet by link: direct")
    phases = {name: _part(phase, proposal, party) for name, phase in plan.phases.items()}
    requests = {name: request for name, request in plan.requests.items() if request.party == party}
    wanted = asdict(proposal.consent) | {"resume": max(1, proposal.consent.resume)}  # at least whoever asks for it
    profile = plan.profile.model_copy(update={"consent": ConsentPart(**wanted)})
    return replace(plan, stages=part_of(plan.stages), phases=phases, requests=requests, profile=profile, seed=None)


def part_of(stages: tuple[str, ...]) -> tuple[str, ...]:
    """The stages of a domain's rollout: it meets the others before anything is rented."""
    found: list[str] = []
    for name in stages:
        if name in _DROPPED:
            continue
        if name == "provision":
            found.append(MEET)
        found.append(name)
        if name == "preflight":
            found += [ROSTER, SHARES]
    return tuple(found)


def barriers_of(plan: Plan) -> list[str]:
    """The stages at which the domains wait for each other, in order."""
    return stages_of((name for name in (SMOKE, FULL) if name in plan.phases), drill=DRILL in plan.stages)


def under(plan: Plan, engine_run: str) -> Plan:
    """The same with the run id that all three domains' pods know it by."""
    phases = {name: replace(phase, engine_run=f"{engine_run}.{name}") for name, phase in plan.phases.items()}
    return replace(plan, phases=phases)


def _part(phase: Phase, proposal: Proposal, party: int) -> Phase:
    return replace(phase, only=party, job={**proposal.job, "steps": phase.steps})
