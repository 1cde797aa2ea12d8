"""Who may ask a served model, and what the tasks that answer queries reveal. Standard library only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

from uvcc_engine.contract.errors import ConfigError

ANSWERED_ONLY: Final[Mapping[str, str]] = {"infer": "predictions", "serve": "answers"}
"""What a task reveals, and nothing else: to the owner of the queries, or to whoever asked."""
CLIENTS: Final = "clients"
"""To whom a policy reveals answers: each to the client whose query it answers."""
MOST_CLIENTS: Final = 64
_KEY: Final = re.compile(r"[0-9a-f]{64}")


def misplaced(item: str, task: str) -> str:
    """Why a task does not reveal this item; empty if it may."""
    only = ANSWERED_ONLY.get(task)
    if only is not None and item != only:
        return f"task {task!r} reveals {only!r} and nothing else"
    owner = next((t for t, revealed in ANSWERED_ONLY.items() if revealed == item and t != task), "")
    return f"task {owner!r} reveals it, and nothing else" if owner else ""


def check_clients(task: str, clients: Sequence[str], idle: float) -> None:
    """Refuse (ConfigError) a served model that nobody may ask, keys that are none, clients of what is not served."""
    if task != "serve":
        if clients or idle:
            name = "clients" if clients else "idle"
            raise ConfigError(f"job.{name} in task {task!r}", "it is of task 'serve'; leave it out")
        return
    if not clients or len(clients) > MOST_CLIENTS or len(set(clients)) != len(clients):
        raise ConfigError(
            f"job.clients lists {len(clients)} clients, {len(set(clients))} of them different",
            f"1 to {MOST_CLIENTS} keys, each once; `uvcc infer init` makes a client's key",
        )
    if not 0 <= idle < math.inf:
        raise ConfigError(f"job.idle is {idle}", "give seconds, 0 for never")
    for key in clients:
        if not _KEY.fullmatch(key):
            raise ConfigError(f"job.clients: {key[:80]!r} is no key", "64 hex digits, as `uvcc infer init` prints them")
