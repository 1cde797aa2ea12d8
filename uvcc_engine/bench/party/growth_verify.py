"""One verification of the growth benchmark: ``-m uvcc_engine.bench.party.growth_verify BUNDLE`` prints JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Final

from uvcc_engine.bench.timing.peak import peak_memory
from uvcc_engine.transcript.proof.verifier import verify

_TRIES: Final = 3
"""Of which the quickest is the one that the machine disturbed least."""


def main() -> int:
    taken = []
    for _ in range(_TRIES):
        before = time.process_time()
        verify(Path(sys.argv[1]))
        taken.append(time.process_time() - before)
    print(json.dumps({"verify": min(taken), "memory": peak_memory()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
