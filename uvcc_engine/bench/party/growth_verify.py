"""One verification of the growth benchmark: ``-m uvcc_engine.bench.party.growth_verify BUNDLE`` prints JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from uvcc_engine.bench.timing.peak import peak_memory
from uvcc_engine.transcript.proof.verifier import verify


def main() -> int:
    before = time.process_time()
    verify(Path(sys.argv[1]))
    print(json.dumps({"verify": time.process_time() - before, "memory": peak_memory()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
