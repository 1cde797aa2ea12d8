"""What the normalising layers have in common."""

from __future__ import annotations

from typing import Final

EPSILON: Final = 2.0**-10
"""Added to a variance before its inverse root."""
HIGHEST: Final = 2.0**20
"""A variance above it is out of the inverse root's range: what features may reach (``sealing.inputs``), squared."""
