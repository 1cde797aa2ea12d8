"""Before a phase can run: inputs shared by the data owner, a policy that all three parties signed, a relay."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvcc_console.plan.exit_words import ended_how
from uvcc_console.plan.owndata import fitted_file, pin_file
from uvcc_console.plan.plan import SMOKE, Phase, derive, pod_name, revealed_values
from uvcc_console.plan.schema import PrivateJobSettings
from uvcc_console.rollout.context import Member, Rollout, each
from uvcc_console.rollout.stages.links.relay import TOKEN_FILE, relay_tokens
from uvcc_console.runs import domain
from uvcc_engine.contract.agent_protocol.agent_commands import PolicyCommand
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.model_hash import model_hash
from uvcc_engine.contract.job.served_clients import ANSWERED_ONLY, CLIENTS
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof.bundle import POLICY_FILE, SIGNATURES_FILE
from uvcc_engine.transcript.signed.proposals import FILE as PROPOSAL_FILE
from uvcc_engine.transcript.signed.proposals import Standing
from uvcc_engine.transcript.signing.identity import PublicIdentity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty, check_signatures, write_signatures

SHARE_S = 300.0
CHECK_S = 120.0
INPUTS_FILE = "inputs.sealed"


@dataclass(frozen=True, slots=True)
class SignedPolicy:
    """A policy with all three signatures, as it lies in ``artifacts/<phase>``."""

    policy: Policy
    folder: Path


def identity_of(ctx: Rollout, party: int, replica: int) -> PublicIdentity:
    """The identity born on a pod. That of a party's first pod is the party's own: it signs the policy."""
    member = ctx.members[pod_name(party, replica)]
    if not member.identity:
        raise ConfigError(f"pod {member.name} shows no identity", "bootstrap it first")
    return PublicIdentity.from_json(member.identity)


def sealed_inputs(ctx: Rollout, pods: list[dict[str, Any]]) -> tuple[Path, Path]:
    """Where the shares for these pods lie, and the list that they were sealed to: one of each per set of identities."""
    folder = ctx.run_dir / "owner"
    first = folder / "parties.json"
    if not first.exists() or json.loads(first.read_text()) == pods:
        return folder / "sealed", first
    other = hashlib.sha256(canonical(pods)).hexdigest()[:8]
    return folder / f"sealed-{other}", folder / f"parties-{other}.json"


def identities_of_pods(ctx: Rollout, phase: Phase) -> list[dict[str, Any]]:
    replicas = range(phase.topology.replicas)
    return [identity_of(ctx, p, r).to_json() for r in replicas for p in range(PARTIES)]


async def share_inputs(ctx: Rollout, phase: Phase) -> dict[str, Any]:
    """Have the data owner's program split and seal the inputs, in a process of its own.

    It runs once for each set of pods: for a smoke on fewer pods than the full run, and once more when a pod was
    replaced: the shares of the lost one were for it alone.
    Returns what the policy binds (``commitments``, ``owner``). Shares leave that process only as sealed files.
    """
    folder = ctx.run_dir / "owner"
    pods = identities_of_pods(ctx, phase)
    out, parties = sealed_inputs(ctx, pods)
    done = out / owner_files.COMMITMENTS
    if done.exists():
        return dict(json.loads(done.read_text()))
    job = ctx.plan.profile.job
    assert isinstance(job, PrivateJobSettings)
    folder.mkdir(mode=0o700, exist_ok=True)
    whole = {k: v for k, v in ctx.plan.phases["full"].job.items() if k != "start"}
    (folder / "job.json").write_text(json.dumps(whole))
    parties.write_text(json.dumps(pods))
    command = [sys.executable, "-m", "uvcc_engine.cli", "share", "--job", str(folder / "job.json")]
    command += ["--parties", str(parties), "--owner", str(folder / "identity"), "--out", str(out)]
    command += ["--seed", str(ctx.plan.seed)] if ctx.plan.seed is not None else []
    command += ["--fitted", str(fitted_file(ctx.run_dir))] if job.data_schema not in ("", owner_files.NO_SCHEMA) else []
    await _run([*command, *_owners_files(ctx, job)], "sharing the inputs", SHARE_S)
    try:
        return dict(json_of(done.read_text()))
    except (OSError, ValueError) as e:
        raise UnreadableError(f"the data owner's program left no commitments: {e}") from e


async def seal_inputs(ctx: Rollout, request: Mapping[str, Any], out: Path) -> None:
    """Have the inputs split and sealed for one attempt of one proposal: a file per party, and ``share.json``."""
    folder = ctx.run_dir / "owner"
    folder.mkdir(mode=0o700, exist_ok=True)
    asked = folder / owner_files.REQUEST
    write_atomic(asked, json.dumps(request).encode(), mode=0o600)
    job = ctx.plan.profile.job
    assert isinstance(job, PrivateJobSettings)
    files = _owners_files(ctx, job)
    files = [part for n, part in enumerate(files) if "--pin" not in (part, files[n - 1])]
    command = [sys.executable, "-m", "uvcc_engine.cli", "seal", "--request", str(asked)]
    command += ["--owner", str(folder / "identity"), "--out", str(out)]
    await _run([*command, *files], "sharing the inputs", SHARE_S)


async def check_job(ctx: Rollout) -> None:
    """Have the data owner's program say whether model, job and data fit, before anything is paid for.

    Raises UvccError with the engine's own words if they do not.
    """
    job, phase = ctx.plan.profile.job, ctx.plan.phases["full"]
    if not isinstance(job, PrivateJobSettings) or (ctx.federated is not None and not ctx.federated.public_data):
        return  # in a federated run the data are their owner's, and so is this look at them
    revealed_values(phase.job)  # the policy will list each of them by name
    wanted = ctx.run_dir / "job.json"
    wanted.write_text(json.dumps(dict(phase.job)))
    t = phase.topology
    sizes = {"--workers": t.workers_per_party * t.microbatches, "--stages": t.stages, "--tensor": t.tensor}
    sizes |= {"--replicas": t.replicas, "--microbatches": t.microbatches}
    command = [sys.executable, "-m", "uvcc_engine.cli", "share", "--check", str(wanted)]
    command += [part for flag, size in sizes.items() for part in (flag, str(size))]
    await _run([*command, *_owners_files(ctx, job)], "checking the job", CHECK_S)


def _owners_files(ctx: Rollout, job: PrivateJobSettings) -> list[str]:
    named = {"--data": job.data, "--schema": job.data_schema, "--labels": job.labels, "--weights": job.weights}
    if (pin := pin_file(ctx.run_dir)).exists():
        named["--pin"] = str(pin)
    return [part for flag, path in named.items() if path for part in (flag, str(Path(path).expanduser()))]


async def _run(command: list[str], what: str, limit: float) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )
    try:
        async with asyncio.timeout(limit):
            _, err = await process.communicate()
    except TimeoutError:
        raise UvccError(f"{what} took longer than {limit:.0f} s", "is the data file too large?") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        if lines and process.returncode > 0:  # its own words, with its own hint
            raise UvccError(f"{what} failed: {lines[-1].removeprefix('error: ')}")
        said = ended_how("the owner's program", process.returncode)
        raise UvccError(f"{what} failed: {said}", "see fleet and job in the profile")


def parties_of(ctx: Rollout, phase: Phase) -> list[PolicyParty]:
    """The parties as a policy of this phase names them: identities born on the pods, and where those run."""
    parties = []
    for party in range(PARTIES):
        pod = ctx.members[pod_name(party, 0)].pod
        assert pod is not None
        public, *others = (identity_of(ctx, party, r) for r in range(phase.topology.replicas))
        parties.append(PolicyParty(party, public, pod.provider, pod.region or "unknown", tuple(others)))
    return parties


def draft(ctx: Rollout, phase: Phase, shared: Mapping[str, Any]) -> Policy:
    """The policy of a phase. It names no run and no time, so the same seed gives the same policy."""
    if ctx.wheel is None:
        raise UnreadableError(f"the engine's wheel is missing in {ctx.run_dir}", "tear down and start a new run")
    profile = ctx.plan.profile
    job = dict(phase.job)
    return Policy.build(
        job=job,
        model_hash=model_hash(job),
        code_hash=ctx.wheel.sha256,
        topology=phase.topology,
        parties=parties_of(ctx, phase),
        owner=str(shared["owner"]),
        commitments=list(shared["commitments"]),
        reveal=_revealed(ctx, job),
        limits={"hourly": profile.limits.hourly, "total": profile.limits.total, "ttl_s": profile.limits.ttl},
        nonce=derive(ctx.plan.seed, "nonce", phase.name).hex(),
    )


async def agree(ctx: Rollout, phase: Phase) -> SignedPolicy:
    """Draft the policy, approve it for each domain, have each party's agent check and sign it, and hand it to all pods.

    An agreement that lies there already is used again: a resume runs under the policy that was signed.
    """
    folder = ctx.artifacts / phase.name
    if ctx.federated is not None:
        agreement = SignedPolicy(*await ctx.federated.agree(ctx, phase))
        await _publish(ctx, folder)
        return agreement
    if (folder / SIGNATURES_FILE).exists():
        agreement = SignedPolicy(Policy.load(folder / POLICY_FILE), folder)
    else:
        policy = draft(ctx, phase, await share_inputs(ctx, phase))
        check_proposal(ctx, phase, policy)
        signers = [ctx.members[pod_name(p, 0)] for p in range(PARTIES)]
        text, digest = policy.canonical.decode(), policy.hash.hex()
        approved = {p: domain.approve_policy(ctx.run_dir, p, digest) for p in range(PARTIES)}
        command = {m.name: PolicyCommand(policy=text, approval=approved[m.request.party]) for m in signers}
        acks = await each(signers, lambda m: m.channel.request(command[m.name]))
        signatures = {m.request.party: str(acks[m.name]["signature"]) for m in signers}
        check_signatures(policy, signatures)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / POLICY_FILE).write_bytes(policy.canonical)
        write_signatures(folder / SIGNATURES_FILE, signatures)
        agreement = SignedPolicy(policy, folder)
    await _publish(ctx, folder)
    await each(ctx.of_phase(phase), lambda m: _hand_over(ctx, phase, m, agreement))
    return agreement


async def _publish(ctx: Rollout, folder: Path) -> None:
    """Have the policy dated and entered in a public log where the profile asks for it, before any pod may begin."""
    wanted = ctx.plan.profile.evidence
    if wanted.timestamp:
        from uvcc_console.report.timestamps import stamp

        await stamp(folder / POLICY_FILE, wanted.timestamp)
    if wanted.log:
        from uvcc_console.report.publishing import PublicLog

        await PublicLog(wanted.log, wanted.log_key).enter_policy(folder)


def _revealed(ctx: Rollout, job: Mapping[str, Any]) -> list[str | tuple[str, str]]:
    """What is revealed, and to whom where the run was started from a proposal."""
    path = ctx.run_dir / PROPOSAL_FILE
    if not path.exists():
        return [(value, CLIENTS) if value == ANSWERED_ONLY["serve"] else value for value in revealed_values(job)]
    return [(r.value, r.to) for r in Standing.from_json(reading.read_json(path)).signed.proposal.reveal]


def check_proposal(ctx: Rollout, phase: Phase, policy: Policy) -> None:
    """Where the run was started from a proposal: nothing but what its three domains approved gets a signature.

    Raises ConfigError naming in what the policy differs.
    """
    path = ctx.run_dir / PROPOSAL_FILE
    if not path.exists():
        return
    standing = Standing.from_json(reading.read_json(path))
    differs = standing.signed.proposal.differs(policy, smoke=phase.name == SMOKE)
    if differs or not standing.approved:
        what = (
            f"the policy of {phase.name} is not what the domains approved: {differs or 'they did not all approve it'}"
        )
        raise ConfigError(what, "propose what is to be run, and have it approved")
    ctx.artifacts.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(ctx.artifacts / PROPOSAL_FILE, path.read_bytes())


def remote_dir(phase: Phase) -> str:
    """The run directory of a phase on a pod, from the pod's home."""
    return f".uvcc/runs/{phase.engine_run}"


async def put_base(ctx: Rollout, phase: Phase, member: Member) -> None:
    """Lay the public base that the job names beside the policy on a pod; its worker holds it to the policy's hash."""
    if phase.job.get("base"):
        await member.ssh.put(ctx.run_dir / owner_files.BASE, f"{remote_dir(phase)}/{owner_files.BASE}")


async def _hand_over(ctx: Rollout, phase: Phase, member: Member, agreement: SignedPolicy) -> None:
    """Policy, signatures, this pod's sealed inputs and its relay token; nobody else's."""
    there = remote_dir(phase)
    await member.ssh.sh(f"umask 077; mkdir -p {there}")
    for name in (POLICY_FILE, SIGNATURES_FILE):
        await member.ssh.put(agreement.folder / name, f"{there}/{name}")
    await put_base(ctx, phase, member)
    party, replica = member.request.party, member.request.replica
    sealed = f"sealed-p{party}r{replica}.bin" if replica else f"sealed-p{party}.bin"
    await member.ssh.put(sealed_inputs(ctx, identities_of_pods(ctx, phase))[0] / sealed, f"{there}/{INPUTS_FILE}")
    await member.ssh.put(relay_tokens(ctx, phase, replica)[party].encode(), f"{there}/{TOKEN_FILE}")
