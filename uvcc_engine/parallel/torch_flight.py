"""Torch's own flight recorder, for gloo and NCCL alike: the newest collectives of this process, by communicator."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from uvcc_engine.contract.run_files import flight

VARIABLE: Final = "TORCH_FR_BUFFER_SIZE"
KEEP: Final = 200


def arm() -> None:
    """Call before the first communicator is made: torch begins to record, about 20 us a collective."""
    os.environ.setdefault(VARIABLE, str(2 * KEEP))
    flight.provide("collectives", collectives)


def collectives() -> list[dict[str, Any]]:
    """Oldest first: group, seq, op, sizes, state (scheduled, started, completed), ``ts``. Empty without torch's."""
    from torch._C import _distributed_c10d as c10d

    # a build with NCCL knows more of it (start and end on the device) under the older name
    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    found = json.loads(dump() or b"{}") if dump is not None else {}
    return [_short(entry) for entry in found.get("entries", [])[-KEEP:]]


def _short(entry: Mapping[str, Any]) -> dict[str, Any]:
    group = entry.get("process_group") or ["", ""]
    done = bool(entry.get("retired")) or entry.get("state") == "completed"
    return {
        "group": str(group[0]),
        "about": str(group[-1]),
        "seq": int(entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", -1)),
        "op": str(entry.get("profiling_name", "")),
        "sizes": entry.get("input_sizes", []),
        "state": "completed" if done else str(entry.get("state", "")),
        "ts": int(entry.get("time_created_ns", 0)) / 1e9,
    }
