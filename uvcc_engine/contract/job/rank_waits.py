"""How long the ranks of a party wait for each other, and the variable of a worker's environment that says otherwise."""

from __future__ import annotations

from typing import Final

GROUP_TIMEOUT_S: Final = 300.0
GROUP_TIMEOUT_VARIABLE: Final = "UVCC_GROUP_TIMEOUT_S"
