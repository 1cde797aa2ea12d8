"""``fleet_forker`` whose workers lie where the environment of their specification says so: ``LIE=p1r1s0t0:name``, a
function of ``private_liars``; or prove in instalments, where it says ``BOUND=words``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import replica_kit

from uvcc_engine.bench.launch import fleet_forker
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.proofs import instalments

_honest = fleet_forker.child


def child(request: dict[str, Any]) -> None:
    spec = WorkerSpec.from_json(request["spec"])
    where, _, name = str(spec.env.get("LIE", "")).partition(":")
    if where == spec.coord:
        sys.path.append(str(Path(__file__).parents[1] / "private"))
        getattr(importlib.import_module("private_liars"), name)(spec)
    if bound := spec.env.get("BOUND"):
        instalments.BOUND, instalments.LEAST = int(bound), 1  # type: ignore[misc]
    _honest(request)


if __name__ == "__main__":
    replica_kit.train(replica_kit.job_of(["linear"], verify="proofs", steps=1), Topology(1))  # loads all, once for all
    fleet_forker.child = child
    fleet_forker.main()
