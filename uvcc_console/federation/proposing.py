"""From a profile to a proposal, and from a proposal to the one screen on which a person decides."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from uvcc_console.federation.domain_key import fingerprint
from uvcc_console.federation.site_policy import SiteJudgement
from uvcc_console.fleet.provider_kinds import PARTIES_KIND, known
from uvcc_console.fleet.wheel import build_wheel
from uvcc_console.plan.owndata import model_words, settle
from uvcc_console.plan.plan import FULL, make_plan, new_run_id, operation_of, revealed_values
from uvcc_console.plan.profile import load
from uvcc_console.plan.schema import Profile
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.job.private_job import SEALED
from uvcc_engine.contract.job.proof_mode import Proving
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.suggest import nearest
from uvcc_engine.contract.text import counted
from uvcc_engine.transcript.signed.proposals import Standing
from uvcc_engine.transcript.terms.operation import Operation
from uvcc_engine.transcript.terms.proposal import EVERYBODY, VERSION, Consents, Proposal, ProposedLimits, Revealed

SEALED_TO_OWNER: Final = (*SEALED, "seeds")
TO_OWNER: Final = "owner"


def propose(
    profile_name: str,
    settings: Sequence[str],
    *,
    coordinator: str,
    domains: Sequence[str],
    owners: Sequence[str],
    lasts_s: float,
    tell: Callable[[str], None],
    providers: Sequence[str] = (),
) -> Proposal:
    """What this profile's full run would be; ``providers``: who hosts each party, where the profile does not say it.

    Raises ConfigError for a job that is not private, for bad keys, and for a provider that a domain could not have.
    """
    name, profile = load(profile_name, settings)
    profile, _ = settle(profile, tell, elsewhere=bool(owners))
    plan = make_plan(new_run_id(name), name, profile)
    full = plan.phases[FULL]
    join = ColumnJoin.of_job(full.job)
    if join is not None:
        join.check_owners(len(owners))
    if len(owners) > 1 and "seeds" in full.job["reveal"]:
        what = "job.reveal lists 'seeds', which would show every owner's rows to the first"
        raise ConfigError(what, "leave it out where a proposal names several owners")
    if full.job.get("task") == "serve":
        raise ConfigError(
            "a served model cannot be proposed yet: nobody hands its clients their tokens", "uvcc rollout"
        )
    if not operation_of(plan) or len(domains) != 3:
        raise ConfigError("a proposal is of a private job and names three domains", "--domain once for P0, P1 and P2")
    code = own_code()
    first, second, third = hosts_of(profile, providers)
    now = int(time.time())
    limits = profile.limits
    return Proposal(
        version=VERSION,
        name=name,
        coordinator=coordinator,
        domains=(domains[0], domains[1], domains[2]),
        owners=tuple(owners),
        job=dict(full.job),
        topology=full.topology,
        code_hash=code,
        reveal=tuple(Revealed(value=v, to=_to_whom(v, owners)) for v in revealed_values(full.job)),
        providers=(first, second, third),
        limits=ProposedLimits(hourly=limits.hourly, total=limits.total, ttl_s=limits.ttl),
        created=now,
        expires=now + int(lasts_s),
        nonce=secrets.token_hex(32),
        consent=Consents(**profile.consent.model_dump()),
    )


def own_code() -> str:
    """The hash of this installation's engine, which a proposal names and each domain's pods are held to."""
    with tempfile.TemporaryDirectory(prefix="uvcc-propose-") as scratch:
        return build_wheel(Path(scratch)).sha256


def hosts_of(profile: Profile, given: Sequence[str]) -> Sequence[str]:
    """Who hosts each of the three parties: as given, else as the profile has it. Raises ConfigError for no provider."""
    if given and len(given) != PARTIES:
        raise ConfigError(f"--providers names {len(given)}", "three, for P0, P1 and P2: runpod,lambda,inventory")
    for name in given:
        if name == PARTIES_KIND or not name:
            raise ConfigError(f"--providers has {name!r}", "each party has one provider")
        near = nearest(name, known())
        if name not in known() and near:  # an operator of a market, or a host's own domain, may be called anything else
            raise ConfigError(f"--providers has {name!r}", f"did you mean {near}?")
    return given or profile.fleet.per_party or [profile.fleet.of(party).provider for party in range(PARTIES)]


def _to_whom(value: str, owners: Sequence[str]) -> str:
    """Pods seal some values to the first owner; where the proposal names owners it says so."""
    return TO_OWNER if owners and value in SEALED_TO_OWNER else EVERYBODY


def _gives(p: Proposal, number: int) -> str:
    """What an owner gives where owners hold different columns of the same rows."""
    join = ColumnJoin.of_job(p.job)
    if join is None:
        return ""
    parts = [f"{join.columns[number]} features"] if join.columns[number] else []
    return ": " + " and ".join([*parts, *(["the labels"] if number == join.label else [])])


def _joined(p: Proposal) -> list[str]:
    join = ColumnJoin.of_job(p.job)
    if join is None:
        return []
    return [f"joins        rows of which all owners have the key {join.key!r}, compared as {join.form}"]


def _words(p: Proposal) -> list[str]:
    """What needs the word of several domains once the run is under way."""
    named = {"full run": p.consent.full, "a resume": p.consent.resume, "an early end": p.consent.terminate}
    wanted = [f"{what} by {count} of {PARTIES} domains" for what, count in named.items() if count]
    return [f"to sign for  {', '.join(wanted)}"] if wanted else []


def _operated(p: Proposal) -> list[str]:
    """Who could look, in both ways in which what was approved can be run: the text does not say in which."""
    proving = Proving.of_job(p.job)
    apart, alone = (Operation.of(p.topology, apart=way).sentences(proving) for way in (True, False))
    lines = [f"operated     with rollout --domain: {apart[0]}", f"             without it: {alone[0]}"]
    return [*lines, *(f"operated     {sentence}" for sentence in apart[1:])]


def screen(standing: Standing, judgement: SiteJudgement | None = None) -> list[str]:
    """What will be computed, revealed to whom, on whose pods, by which code, at what cost, and who said what."""
    p = standing.signed.proposal
    t, job = p.topology, p.job
    steps = job.get("steps")
    length = counted(steps, "step") if isinstance(steps, int) else f"{steps or '?'} steps"
    lines = [
        f"proposal     {p.id}",
        f"name         {p.name}, until {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(p.expires))}",
        f"coordinator  {fingerprint(p.coordinator)}",
        f"computes     {job.get('kind')}, {model_words(job.get('model', '?'))}, {length} of {job.get('batch')} rows",
        *(f"base         {b}: public weights, which each pod holds to this hash" for b in [job.get("base")] if b),
        f"shape        3 parties x {t.replicas} x {t.stages} x {t.tensor}",
        f"reveals      {', '.join(f'{r.value} to {r.to}' for r in p.reveal) or 'nothing'}",
        *(f"owner        {fingerprint(key)}{_gives(p, number)}" for number, key in enumerate(p.owners)),
        *_joined(p),
        f"code         {p.code_hash}",
        f"costs        at most {p.limits.hourly:.2f} $/h, {p.limits.total:.2f} $, {p.limits.ttl_s / 3600:g} h",
        *_words(p),
        *_operated(p),
    ]
    for party, key in enumerate(p.domains):
        heard = standing.said.get(party)
        word = (
            "no word yet"
            if heard is None
            else f"{heard[0].decision}s" + (f": {heard[0].reason}" * bool(heard[0].reason))
        )
        lines.append(f"P{party}           {p.providers[party]}, {fingerprint(key)}: {word}")
    if judgement is not None:
        lines += [f"REFUSED      {rule}: {why}" for rule, why in judgement.refused] or ["site policy  allows it"]
    return lines
