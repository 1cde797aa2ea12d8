"""The messages that a party's group takes for what a training step asks of it, by members that are processes.

``-m uvcc_engine.bench.party.group_messages CONFIG 0`` forks ``members`` of CONFIG and prints JSON: ``messages`` of all
members together, of the collectives of one step. Their sizes are those of the scale benchmark's model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from uvcc_engine.parallel.unix_group import UnixGroup

LIMIT: Final = timedelta(seconds=120)
VOTE, BEAT, SLICE = 2, 17, 566  # numbers: of a vote, of what a worker tells the others, of a replica's share of a sum


def messages(members: int, folder: Path) -> int:
    """Of all ``members`` together. Raises RuntimeError if one of them fails."""
    came, told = os.pipe()
    pids = []
    for index in range(members):
        if not (pid := os.fork()):
            os._exit(_member(folder / "store", index, members, told))
        pids.append(pid)
    os.close(told)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise RuntimeError(f"a member of a group of {members} failed")
    with os.fdopen(came) as lines:
        return sum(map(int, lines))


def _member(store: Path, index: int, members: int, told: int) -> int:
    """Its exit code."""
    try:
        meeting = dist.FileStore(str(store), members)  # type: ignore[attr-defined]  # the stubs do not export it
        sent = _sent(UnixGroup(meeting, index, members, LIMIT))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    os.write(told, f"{sent}\n".encode())
    return 0


def _sent(group: UnixGroup) -> int:
    """What this member sends in one step: a vote, news, its share of the sum of gradients, and the sum to all."""
    members, before = group.size(), group.messages
    group.allreduce([torch.zeros(VOTE, dtype=torch.int64)]).wait()
    group.all_gather_single(torch.empty(members * BEAT, dtype=torch.int64), torch.zeros(BEAT, dtype=torch.int64)).wait()
    share = torch.empty(SLICE, dtype=torch.int64)
    group.reduce_scatter_single(share, torch.zeros(members * SLICE, dtype=torch.int64)).wait()
    group.all_gather_single(torch.empty(members * SLICE, dtype=torch.int64), share).wait()
    return group.messages - before


def main() -> int:
    members = json.loads(Path(sys.argv[1]).read_text())["members"]
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"messages": messages(members, Path(folder))}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
