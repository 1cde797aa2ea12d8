"""Screens as evidence: SVG, text and JSON of one moment, with their SHA-256, in the run's folder.

Nothing is written when the screen shows text shaped like a share, a key or a token.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.run_base import RunConsole
from uvcc_engine.contract.parsing.untrusted import without_nan


@dataclass(frozen=True, slots=True)
class SavedScreen:
    """Where the files lie and what they hash to."""

    folder: Path
    stem: str
    hashes: Mapping[str, str]


def _plain(value: Any, series: bool) -> Any:
    if isinstance(value, Series):
        return {"x": list(value.xs()), "y": list(value.ys())} if series else {}
    if isinstance(value, Mapping):
        return {str(k): _plain(v, series) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), series) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(v, series) for v in value]
    return value


def snapshot_json(snap: Snapshot, *, series: bool = True) -> str:
    """The snapshot without its log (the journal keeps that) as JSON; also without the ``series`` of figures."""
    return json.dumps(
        without_nan(_plain(dataclasses.replace(snap, log=()), series)), indent=1, sort_keys=True, default=str
    )


def screen_text(app: RunConsole) -> str:
    """The screen's characters, row by row."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips) + "\n"


def save(app: RunConsole) -> SavedScreen:
    """Write the three files and their sums. Raises OSError, or RedactionError for a screen that must not leave.

    VerificationError if the run's manifest was signed already and a file was changed since.
    """
    from uvcc_console.report import collector
    from uvcc_console.report.redact import checked

    folder = app.run_dir / "artifacts" / "evidence"
    now = app.now()
    stem = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now)) + f"-{int(now * 1000) % 1000:03d}"
    contents = {
        f"{stem}.svg": app.export_screenshot(title=app.snap.run),
        f"{stem}.txt": screen_text(app),
        f"{stem}.json": snapshot_json(app.snap),
    }
    # the SVG shows the same characters as the text; series are figures that were revealed one by one, and no tensors
    looked_at = {f"{stem}.txt": contents[f"{stem}.txt"], f"{stem}.json": snapshot_json(app.snap, series=False)}
    for name, text in looked_at.items():
        collections.deque(checked(name, text.splitlines()), maxlen=0)
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in contents.items()}
    sums = "".join(f"{digest}  {name}\n" for name, digest in hashes.items())
    with collector.renewing(app.run_dir) as written:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        written += (folder / name for name in (*contents, "SHA256SUMS"))
        for name, text in contents.items():
            (folder / name).write_text(text, encoding="utf-8")
        with (folder / "SHA256SUMS").open("a", encoding="utf-8") as out:
            out.write(sums)
    return SavedScreen(folder, stem, hashes)
