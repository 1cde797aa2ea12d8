"""One party that trains steadily: ``-m uvcc_engine.bench.party.steady_party CONFIG PARTY`` prints a line of JSON.

It says when each step began and ended, on the clock that all processes of a machine share, so that whoever changes
something beside it can tell which steps the change met, and what processor time each took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from uvcc_engine.bench.party.share_party import training
from uvcc_engine.mpc.kernels.memory import keep_freed_memory

MOST: Final = 4_000


def measure(config: dict[str, Any], party: int, folder: Path) -> list[tuple[float, float, float]]:
    """Begin, end (``time.monotonic``) and processor seconds of every step with its transcript.

    For ``seconds`` after the first two.
    """
    found: list[tuple[float, float, float]] = []
    with training(config, party, folder, MOST) as body:
        for number in range(MOST):
            took = body.step(number, on=True)
            now = time.monotonic()
            found.append((now - took.wall, now, took.cpu))
            if not body.goes_on(more=number < 2 or now - found[1][1] < float(config["seconds"])):
                break
    return found[2:]


def main() -> int:
    torch.set_num_threads(1)
    keep_freed_memory()
    path = Path(sys.argv[1])
    print(json.dumps(measure(json.loads(path.read_text()), int(sys.argv[2]), path.parent)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
