"""The engine's word on a language model's settings, before anything is rented for them: it reads them here, without
torch, as the ranks will on their pods."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from uvcc_console.plan import changed_settings
from uvcc_console.plan.plan import FULL, Plan
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.parsing.untrusted import json_of

LIMIT_S: Final = 120.0


def check(plan: Plan, changed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the engine makes of the full run's settings, with those that were ``changed`` in a run.

    Raises ConfigError naming one that would ruin it, or that does not exist.
    """
    phase = plan.phases[FULL]
    job = changed_settings.laid_upon(phase.job, changed or {})
    asked = {"job": job, "ranks": phase.topology.replicas, "env": dict(plan.profile.env)}
    said = _ask(json.dumps(asked))
    if not said.pop("ok"):
        raise ConfigError(str(said["error"]), str(said["hint"]))
    return said


def _ask(question: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "uvcc_engine.train.settings_check"]
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return dict(json_of(done.stdout))
    except subprocess.TimeoutExpired:
        raise UvccError(f"the engine did not read the settings in {LIMIT_S:.0f} s", "try again") from None
    except (subprocess.CalledProcessError, ValueError) as e:
        last = getattr(e, "stderr", "").strip().rpartition("\n")[2]
        raise UvccError(f"the engine cannot read the settings: {last or e}", "is this installation whole?") from e
