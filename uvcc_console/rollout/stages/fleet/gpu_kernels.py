"""Before a private run on GPUs: each pod compiles the kernels that its steps need, and shows that their bits are right.

What was compiled stays on the pod's disk, where its workers find it: otherwise the first step of each would compile for
some fifteen seconds, in which it cannot hold.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

from uvcc_console.rollout.context import Member, Rollout, each
from uvcc_console.rollout.stages.training.lm import engine_command
from uvcc_engine.contract.errors import UnreachableError
from uvcc_engine.contract.parsing.safepaths import shown
from uvcc_engine.contract.parsing.untrusted import as_float

KERNELS_S: Final = 600.0
_HINT: Final = "take another image or GPU, or job.device: cpu; nothing was trained"


async def compiled(ctx: Rollout, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """Have the pods of these names compile and try their kernels. By pod: the facts, or ``error`` and ``hint``."""

    async def one(member: Member) -> dict[str, Any]:
        done = await member.ssh.run(
            engine_command(ctx, member, "-m uvcc_engine.mpc.kernels.gpu_trial"), timeout=KERNELS_S
        )
        if done.exit is None:
            what = f"pod {member.name} did not compile its GPU's kernels in {KERNELS_S:g} s ({done.trouble})"
            raise UnreachableError(what, "retry; job.device: cpu takes none")
        return told(done.text)

    return await each([member for member in ctx.due() if member.name in names], one)


def told(text: str) -> dict[str, Any]:
    """What the last line of a pod's trial says."""
    try:
        said = json.loads(text.strip().rpartition("\n")[2])
        took, error = as_float(said.get("kernels_s")), str(said.get("error") or "")
    except (ValueError, TypeError, AttributeError, RecursionError):
        took, error = None, ""
    if error or took is None:
        what = shown(error[:300]) if error else "it did not answer"
        return {"ok": False, "error": f"the GPU's kernels for secret shares cannot be used: {what}", "hint": _HINT}
    return {"ok": True, "kernels_s": took}
