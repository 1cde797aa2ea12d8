"""How the names of the records begin that coordinator, domains and data owners leave for each other at a relay.

The relay decides by them who may leave and who may read a record; what a record says is signed, and no matter of its
name.
"""

from __future__ import annotations

from typing import Final

PROPOSALS: Final = "proposal/"
APPROVALS: Final = "approval/"
ROSTERS: Final = "roster/"
BARRIERS: Final = "barrier/"
REPORTS: Final = "report/"
SIGNATURES: Final = "policy/"
OWNER_KEYS: Final = "owner-key/"
OWNER_SHARES: Final = "owner-share/"
OWNER_JOINS: Final = "owner-join/"

MAIL_KEPT_S: Final = 7 * 86_400
"""So long a relay keeps what lies in a mailbox for somebody who is away: a weekend, and a few days."""
