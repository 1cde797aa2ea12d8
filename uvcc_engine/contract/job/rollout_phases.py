"""The two phases of a rollout that train: a short one that is judged, then the whole."""

from __future__ import annotations

from typing import Final

SMOKE: Final = "smoke"
FULL: Final = "full"
PHASES: Final = (SMOKE, FULL)
