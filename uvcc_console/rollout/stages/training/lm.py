"""What a language-model job has instead of shares and proofs: a fit before the launch, a checkpoint after it.

Its weights are the operator's own, so its checkpoints come home (``homing``); before the last one counts, the pod has
read every byte of it, and here it is read once more.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.fleet.bootstrap import CACHES
from uvcc_console.plan.plan import FULL, Phase
from uvcc_console.plan.schema import LmJobSettings
from uvcc_console.rollout.context import Member, Rollout, each
from uvcc_console.rollout.stages.migration import checkpoint_copies
from uvcc_console.rollout.stages.verify import collect
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.parsing.safepaths import shown

FIT_S = 300.0
VERIFY_S = 900.0
ATTENTION_S = 900.0
_VERIFY = """
import json, sys
from pathlib import Path
from uvcc_engine.contract.checkpoints import checkpoint
bad = []
found = checkpoint.latest_verified(
    Path(sys.argv[1]) / "checkpoints", run=sys.argv[2], on_bad=lambda path, error: bad.append(str(error)))
files = {n: f for r in found.ranks.values() for n, f in r.files.items()} if found else {}
print(json.dumps({"step": found.step if found else -1, "sha256": found.sha256 if found else "", "files": files,
                  "bad": bad}))
"""


async def fits(ctx: Rollout) -> dict[str, dict[str, Any]]:
    """Have every pod resolve the full job and say what it needs: memory, ranks, tokenizer, a first batch of data.

    By pod: the facts, or ``error`` and ``hint``. Costs a few seconds, and the download of one batch.
    """
    phase = ctx.plan.phases[FULL]
    asked = {"job": dict(phase.job), "ranks": phase.topology.replicas, "env": dict(ctx.plan.profile.env)}

    async def one(member: Member) -> dict[str, Any]:
        command = engine_command(ctx, member, "-m uvcc_engine.train.check")
        return _answer(member, await member.ssh.sh(command, timeout=FIT_S, stdin=json.dumps(asked).encode()))

    return await each(ctx.of_phase(phase), one)


async def attention(ctx: Rollout, thoroughly: str) -> dict[str, dict[str, Any]]:
    """Have every pod of the full run prove attention on its own device: causality, gradients, decoding.

    ``thoroughly``: quick or full. By pod: the facts, or ``error`` and ``hint``. Minutes on processors.
    """

    async def one(member: Member) -> dict[str, Any]:
        full = " --full" if thoroughly == "full" else ""
        command = engine_command(ctx, member, f"-m uvcc_engine.nsa.selftest --json{full}")
        done = await member.ssh.run(command, timeout=ATTENTION_S)
        if done.exit is None:
            what = f"pod {member.name} gave no word on its attention in {ATTENTION_S:g} s ({done.trouble})"
            raise UnreachableError(what, "retry; gates.attention: quick takes less")
        return proven(done.text)

    return await each(ctx.of_phase(ctx.plan.phases[FULL]), one)


def proven(text: str) -> dict[str, Any]:
    """What the last line of a pod's self-test says: which checks hold, or the first that does not."""
    try:
        rows = [(str(r["name"])[:40], r["ok"] is True, str(r["detail"])[:200]) for r in json.loads(_last_line(text))]
    except (ValueError, TypeError, KeyError, RecursionError):
        rows = []
    wrong = next(
        (f"{name}: {shown(detail)}" for name, ok, detail in rows if not ok), "" if rows else "it did not answer"
    )
    if wrong:
        hint = "take another image or GPU, or look by hand: uvcc-engine selftest; nothing was trained"
        return {"ok": False, "error": f"attention is wrong on its device: {wrong}", "hint": hint}
    return {"ok": True, "attention": ", ".join(name for name, _, _ in rows)}


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


async def verify_phase(ctx: Rollout, phase: Phase) -> str:
    """The phase left a checkpoint of its last step that is whole and is the one its result names.

    Of the full run it is fetched. Raises VerificationError naming the pod.
    """
    found = await each(ctx.of_phase(phase), lambda m: _verified(ctx, phase, m))
    job = ctx.plan.profile.job
    fetch = phase.name == FULL and isinstance(job, LmJobSettings) and job.fetch_checkpoint
    for name, there in found.items():
        member = ctx.members[name]
        if fetch and isinstance(job, LmJobSettings):
            step, sha256, keep = int(there["step"]), str(there["sha256"]), job.fetch_keep
            await checkpoint_copies.bring_home(ctx, phase, member, step, sha256, keep=keep, rate=math.inf)
        fields = {"step": there["step"], "sha256": there["sha256"], "phase": phase.name, "fetched": fetch}
        ctx.say(ev.EngineEvent(pod=name, level="info", event="checkpoint_verified", fields=fields))
    await collect.fetch_phase(ctx, phase)  # at once: a pod that is lost later takes its logs and series along
    first = next(iter(found.values()))
    size = sum(int(f["bytes"]) for f in first["files"].values()) / (1 << 20)
    return f"checkpoint of step {first['step']}, {size:.1f} MiB, {first['sha256'][:12]}" + (", fetched" * fetch)


async def _verified(ctx: Rollout, phase: Phase, member: Member) -> dict[str, Any]:
    there = f'"$HOME"/.uvcc/runs/{shlex.quote(phase.engine_run)}'
    command = engine_command(ctx, member, f"-S - {there} {shlex.quote(phase.engine_run)}")
    found = told(member.name, _answer(member, await member.ssh.sh(command, timeout=VERIFY_S, stdin=_VERIFY.encode())))
    if found["step"] != phase.steps:
        why = f": {found['bad'][0]}" if found["bad"] else ""
        raise VerificationError(
            "checkpoint", f"pod {member.name} has none of step {phase.steps} that verifies{why}", "resume the run"
        )
    reported = {h for key, h in ctx.bus.snapshot.result_hashes.items() if key.startswith(f"{phase.name}/")}
    if reported and not reported & {str(f["sha256"]) for f in found["files"].values()}:
        raise VerificationError(
            "checkpoint", f"the checkpoint of pod {member.name} is not the result that was reported", "start a new run"
        )
    return found


def told(pod: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """What a pod says of its checkpoint, in the form that it must have. Raises VerificationError for any other."""
    try:
        described = {
            checkpoint.checked_name(name): checkpoint.checked_file(name, file)
            for name, file in dict(answer["files"]).items()
        }
        step, sha256, bad = answer["step"], answer["sha256"], [str(b)[:200] for b in answer["bad"]]
        if type(step) is not int or not isinstance(sha256, str) or not re.fullmatch(r"([0-9a-f]{64})?", sha256):
            raise ValueError("its step or its hash is none")
        return {"step": step, "sha256": sha256, "files": described, "bad": bad}
    except (KeyError, TypeError, ValueError, ConfigError) as e:
        what = f"pod {pod} describes its checkpoint in a way that none is: {shown(str(e))}"
        raise VerificationError("checkpoint", what, "look at that pod by hand") from e


def engine_command(ctx: Rollout, member: Member, arguments: str) -> str:
    """A command line that runs the pod's Python with this run's engine."""
    if ctx.wheel is None:
        raise UnreadableError(f"the engine's wheel is missing in {ctx.run_dir}", "tear down and start a new run")
    python = shlex.quote(member.boot.python if member.boot else "python3")
    site = f'"$HOME"/.uvcc/{shlex.quote(ctx.wheel.site_name)}'
    return f"OMP_NUM_THREADS=1 PYTHONPATH={site} {CACHES} exec {python} {arguments}"


def _answer(member: Member, text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text.splitlines()[-1]))
    except (ValueError, TypeError, IndexError, RecursionError):
        raise UvccError(f"pod {member.name} answered {text[:80]!r}", "see the pod by hand") from None
