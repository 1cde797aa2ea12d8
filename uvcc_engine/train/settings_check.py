"""Whether a job's settings make a run at all, said without torch, data or a device.

``python -m uvcc_engine.train.settings_check`` is asked by a console before anything is rented, and before a run goes on
with others.

What depends on the pod (memory, devices, text) is for ``uvcc_engine.train.check``, which is asked there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.train import env as lm_env
from uvcc_engine.train.config import BY_VRAM, LMConfig
from uvcc_engine.train.lm_job import AUTO, check_plan, check_world, resolve


def check(job: Mapping[str, Any], ranks: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """What the console is to know of the settings. Raises UvccError naming the first that ruins the run.

    Of what a pod's memory would pick, one that fits will do. A file that is not here is for the pod to read.
    """
    name = job.get("config")
    refused: list[UvccError] = []
    for one in BY_VRAM if name == AUTO else (name,):
        if isinstance(one, str) and one.endswith((".yaml", ".yml")) and not Path(one).is_file():
            return {}
        try:
            cfg = _resolved({**job, "config": one}, ranks, environ)
            return {"attention": cfg.model.attention, "device": cfg.runtime.device}
        except UvccError as error:
            refused.append(error)
    raise refused[0]


def _resolved(job: Mapping[str, Any], ranks: int, environ: Mapping[str, str]) -> LMConfig:
    cfg, _ = lm_env.apply(resolve(job), environ)
    plan = job.get("plan") or {}
    check_plan(cfg, {key: value for key, value in plan.items() if key != "parameters"})  # torch counts those
    check_world(cfg, ranks)
    return cfg


def answer(ask: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> int:
    """What ``ask`` says to the question on stdin ({job, ranks, env}), or error and hint, as one JSON line on stdout."""
    try:
        said = {"ok": True, **ask(json.load(sys.stdin))}
    except UvccError as error:
        said = {"ok": False, "error": error.what, "hint": error.hint}
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(answer(lambda asked: check(asked["job"], int(asked["ranks"]), asked["env"])))
