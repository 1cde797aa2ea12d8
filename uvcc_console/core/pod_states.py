"""The states of a pod, in the order of a life, and the sets of them that decisions are made by."""

from __future__ import annotations

from typing import Final

PLANNED, CREATING, BOOTING, READY, AGENT = "planned", "creating", "booting", "ready", "agent"
LOST, DELETING, GONE, FAILED = "lost", "deleting", "gone", "failed"
STATES: Final = (PLANNED, CREATING, BOOTING, READY, AGENT, LOST, DELETING, GONE, FAILED)

ABSENT: Final = (PLANNED, GONE)  # nothing of it exists, and nothing of it is billed
OVER: Final = (GONE, FAILED)  # it does not come back
LEAVING: Final = (*OVER, DELETING)  # nothing more is expected of it
ATTACHABLE: Final = (AGENT, LOST)  # its agent can be spoken to, now or when it is back
BROKEN: Final = (FAILED, LOST)  # an operator should look at it
REACHED: Final = (READY, AGENT)
UNREACHABLE: Final = (PLANNED, CREATING, BOOTING, *LEAVING)
RENTED: Final = (BOOTING, READY, AGENT, LOST, DELETING)
CHANGING: Final = (CREATING, BOOTING, DELETING)

LOOKED_AT: Final = "its machine was looked at"
"""What is said of a pod of state agent once preflight has probed it: by this its progress is counted."""
