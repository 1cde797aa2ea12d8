"""What a rollout will do, decided before anything is created: run id, stages, phases, pods."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from uvcc_console.fleet.provider import POD_PREFIX, PodRequest
from uvcc_console.fleet.provider_kinds import DEFAULT, kind_of
from uvcc_console.plan.schema import CommandJobSettings, LmJobSettings, PrivateJobSettings, Profile
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import where_it_says_something
from uvcc_engine.contract.job.proof_mode import Proving
from uvcc_engine.contract.job.rollout_phases import FULL as FULL
from uvcc_engine.contract.job.rollout_phases import SMOKE as SMOKE
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.transcript.terms.operation import Operation

SIGTERM = "sigterm"  # job.halt of a command that never looks at a control file
# keys of a private job that name the owner's files here; all others go into the policy
OWNERS_FILES = ("data", "data_schema", "labels", "weights")
_OF_BASE = ("base", "base_sha256", "adapters")
# stages that train: they go on from a checkpoint
RESUMABLE = frozenset({"drill", SMOKE, FULL})
# stages that hold what was trained to account, and the one whose training that was; the pods have the only evidence
JUDGED = {"verify-smoke": SMOKE, "gate": SMOKE, "verify-full": FULL, "collect": FULL}
# stages that bring up the pods which only the full run needs, once the smoke has passed its gates
LATER = ("provision-full", "bootstrap-full", "preflight-full")
# stages whose failure leaves something to go on from, or to look into: their pods are kept for a while
KEEPING = RESUMABLE | frozenset(JUDGED) | frozenset(LATER)


@dataclass(frozen=True, slots=True)
class Phase:
    """The smoke or the full job: what the policy of ``engine_run`` says.

    ``only``: the one party whose workers are driven from here, -1 for all of them.
    """

    name: str
    engine_run: str
    kind: str
    steps: int
    topology: Topology
    job: Mapping[str, Any]
    parties: int
    only: int = -1

    def coords(self, pod: str = "") -> list[Coord]:
        """Workers of this phase, of one pod if named; interleaved over parties."""
        found = [c for c in self.topology.coords() if c.party < self.parties and self.only in (-1, c.party)]
        return [c for c in found if not pod or self.pod_of(c) == pod]

    def pod_of(self, coord: Coord) -> str:
        """The pod that hosts a worker: one per party and replica; the ranks of a one-domain job share theirs."""
        return pod_name(coord.party, coord.replica) if self.parties > 1 else pod_name(0, 0)

    def pods(self) -> list[str]:
        """Pods that take part, interleaved over parties."""
        return list(dict.fromkeys(self.pod_of(c) for c in self.coords()))

    def sharing(self) -> tuple[int, int]:
        """How many workers compute at once: where all pods are on one machine, of other domains, too, and on a pod."""
        pods = Counter(self.pod_of(c) for c in self.coords())
        domains = 1 if self.only == -1 else self.parties
        return domains * pods.total(), max(pods.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided about a rollout before it begins."""

    run: str
    profile_name: str
    profile: Profile
    seed: int | None
    stages: tuple[str, ...]
    phases: Mapping[str, Phase]
    requests: Mapping[str, PodRequest]

    @property
    def prefix(self) -> str:
        """What every pod name of this run starts with, for the provider."""
        return pod_prefix(self.run, self.profile)

    @property
    def later(self) -> tuple[str, ...]:
        """Pods that are rented only after the smoke's gates; all others are rented first."""
        if LATER[0] not in self.stages:
            return ()
        first = set(self.phases[SMOKE].pods())
        return tuple(name for name in self.requests if name not in first)


def pod_name(party: int, replica: int) -> str:
    """A pod's name inside its run; the provider sees it behind the run's prefix."""
    return f"p{party}r{replica}"


def pod_prefix(run: str, profile: Profile) -> str:
    """The run's own prefix, or that of the pods which it takes over (``fleet.attach_prefix``).

    Raises ConfigError for a prefix that could meet pods which are not ours.
    """
    given = profile.fleet.attach_prefix
    if given and not re.fullmatch(rf"{POD_PREFIX}[A-Za-z0-9._-]{{1,160}}-", given):
        raise ConfigError(f"fleet.attach_prefix is {given!r}", f"it is {POD_PREFIX}RUN-, see: uvcc pods")
    return given or f"{POD_PREFIX}{run}-"


def new_run_id(name: str, now: float | None = None, token: str = "") -> str:
    """``demo-20261121-0115-ab12``: profile, UTC minute, four random hex digits."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] or "run"
    minute = time.strftime("%Y%m%d-%H%M", time.gmtime(now if now is not None else time.time()))
    return f"{stem}-{minute}-{token or secrets.token_hex(2)}"


def stage_names(profile: Profile) -> tuple[str, ...]:
    """The stages (docs/architecture.md, "A rollout") of this profile, in order; names are unique in a run."""
    verified = isinstance(profile.job, PrivateJobSettings | LmJobSettings)
    before = ["plan", "quote", "provision", "bootstrap", "preflight"]
    smoke = ["drill", SMOKE, *(["verify-smoke"] if verified else []), "gate"] if profile.smoke.steps else []
    smoke += LATER if widens(profile) else ()
    after = [FULL, *(["verify-full"] if verified else []), "collect", "teardown"]
    return tuple(before + smoke + after)


def widens(profile: Profile) -> bool:
    """Whether the smoke needs fewer pods than the full run, and the others are rented only after its gates."""
    fewer = isinstance(profile.job, PrivateJobSettings) and profile.smoke.replicas < profile.topology.replicas
    return bool(profile.smoke.steps and fewer and not profile.fleet.reserve and not profile.fleet.attach_prefix)


def _phase(run: str, name: str, profile: Profile, steps: int, replicas: int) -> Phase:
    part = profile.topology
    if isinstance(profile.job, PrivateJobSettings):
        topology, parties = Topology(replicas, part.stages, part.tensor, part.microbatches), PARTIES
    else:
        topology, parties = Topology(profile.job.ranks), 1
    return Phase(
        name,
        f"{run}.{name}",
        profile.job.kind,
        steps,
        topology,
        engine_job(profile.job, steps, profile.fleet.kind),
        parties,
    )


def engine_job(
    job: PrivateJobSettings | LmJobSettings | CommandJobSettings, steps: int, provider: str = DEFAULT
) -> dict[str, Any]:
    """The job as the worker reads it, with the phase's number of steps, for pods of that provider."""
    if isinstance(job, PrivateJobSettings):
        found = job.model_dump(mode="json", exclude={*OWNERS_FILES, *_OF_BASE, "epochs"}) | {"steps": steps}
        found["base"] = job.base_sha256
        found["join"] = job.join.model_dump(exclude={"outputs"}) if job.join is not None else None
        if job.rounds == "auto":
            found["rounds"] = "sparing" if kind_of(provider).here else "few"
        return where_it_says_something(found)
    if isinstance(job, LmJobSettings):
        train = {"seed": job.seed, **job.overrides.get("train", {}), "steps": steps}
        return {"config": job.config, "plan": dict(job.plan), **job.overrides, "train": train}
    # where code is brought along the command itself goes to its folder there
    return {"steps": steps, "cwd": "" if job.code else job.cwd} | ({"halt": SIGTERM} if job.halt == SIGTERM else {})


def _requests(run: str, profile: Profile, full: Phase) -> dict[str, PodRequest]:
    found: dict[str, PodRequest] = {}
    for coord in full.coords():
        name = full.pod_of(coord)
        if name in found:
            continue
        fleet = profile.fleet.of(coord.party)
        found[name] = PodRequest(
            name=f"{pod_prefix(run, profile)}{name}",
            party=coord.party,
            replica=coord.replica,
            gpu=fleet.gpu,
            gpu_count=fleet.gpus if fleet.gpu else 0,
            image=fleet.image,
            region=fleet.regions[0] if fleet.regions else "",
            want_provider=fleet.per_party[coord.party] if fleet.per_party else "",
            max_price_hr=fleet.max_price or None,
            spot=bool(fleet.spot),
            disk_gib=fleet.disk,
        )
    return found


def make_plan(run: str, profile_name: str, profile: Profile, seed: int | None = None) -> Plan:
    """Work out everything that does not depend on a provider. Raises ConfigError for a job that cannot be placed."""
    if not isinstance(profile.job, PrivateJobSettings) and profile.topology != type(profile.topology)():
        raise ConfigError(
            f"topology has no meaning for a {profile.job.kind} job", "its parallel size is job.ranks; drop topology"
        )
    full = _phase(run, FULL, profile, profile.job.steps, profile.topology.replicas)
    phases = {FULL: full}
    if profile.smoke.steps:
        steps = min(profile.smoke.steps, profile.job.steps)
        phases[SMOKE] = _phase(run, SMOKE, profile, steps, profile.smoke.replicas)
    return Plan(run, profile_name, profile, seed, stage_names(profile), phases, _requests(run, profile, full))


def operation_of(plan: Plan) -> tuple[str, ...]:
    """Who could look into this run, how a party's own traffic is protected, what it proves, if anything; nothing
    for jobs that claim no privacy."""
    full = plan.phases[FULL]
    said = Operation.of(full.topology, apart=full.only >= 0).sentences(Proving.of_job(full.job))
    return said if full.kind == "private" else ()


def revealed_values(job: Mapping[str, Any]) -> list[str]:
    """What a policy of this job lists: a confusion matrix by each of its numbers. Raises ConfigError where unknown."""
    reveal = list(job["reveal"])
    if "confusion" not in reveal:
        return reveal
    model = job["model"]
    if not isinstance(model, Mapping):
        raise ConfigError("job.reveal: confusion, of a model by name", "give job.model as a list of layers")
    classes = range(max(2, int(model["classes"])))
    return [*reveal, *(f"confusion.{i}.{j}" for i in classes for j in classes)]


def derive(seed: int | None, *labels: str) -> bytes:
    """32 bytes for one purpose: fixed by ``seed`` (a demo that can be repeated), fresh without one."""
    if seed is None:
        return secrets.token_bytes(32)
    return hashlib.sha256("\0".join(["UVCC_SEED_V1", str(seed), *labels]).encode()).digest()
