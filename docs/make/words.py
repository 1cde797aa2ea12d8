"""Small things that the generated pages share."""

from __future__ import annotations

import re
from typing import Final

HEAD: Final = "<!-- made by python -m docs.make; do not edit -->"


def cell(text: str) -> str:
    """A text that fits into one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: one paragraph, code as the page writes it."""
    text = re.sub(r":(?:class|mod|func|meth):`~?([\w.]+)`", r"`\1`", docstring or "")
    return " ".join(text.replace("``", "`").split())
