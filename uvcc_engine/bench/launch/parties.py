"""Three processes, one per party, from one configuration: each prints one JSON value, which is returned by party.

Where fewer or more are wanted, they are no parties but what the module says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.topology import PARTIES


def one_core() -> dict[str, str]:
    """The environment of a process that computes on one core."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def said_by(module: str, config: Mapping[str, Any], limit_s: float = 1800.0, *, count: int = PARTIES) -> list[Any]:
    """What ``python -m uvcc_engine.bench.party.<module> CONFIG PARTY`` printed. Raises UvccError if a party fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", f"uvcc_engine.bench.party.{module}", str(path)]
        parties = [
            subprocess.Popen([*command, str(p)], stdout=subprocess.PIPE, text=True, env=one_core())
            for p in range(count)
        ]
        try:
            said = [party.communicate(timeout=limit_s)[0] for party in parties]
        except subprocess.TimeoutExpired as e:
            raise UvccError(f"the parties of {module} took more than {limit_s:.0f} s", "is the machine busy?") from e
        finally:
            for party in parties:
                party.kill()
                party.wait()
    if failed := [p for p, party in enumerate(parties) if party.returncode]:
        raise UvccError(f"P{failed[0]} of {module} failed", "see what it said above")
    return [json.loads(text) for text in said]
