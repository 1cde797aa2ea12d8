"""``python -m docs.make.recording [RUN_DIR]``: README's moving picture of a recorded run, from the console's replay.

With a run's folder its journal becomes the recording that lies beside the picture (``docs/demo/recording.jsonl``);
without one the picture is made again from what lies there, as it must be whenever the screen has changed. The picture
is SVG with CSS alone: no script, and nothing that is fetched. It names the recording that it was made from and a digest
of all words on it; a test plays the recording again and compares.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import re
import sys
from pathlib import Path
from typing import Final

from uvcc_console.core.answers.shown import Changes
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.judging.rechecks import Rechecks

FRAMES: Final = 12
SECONDS: Final = 2.0
SIZE: Final = (110, 30)
DOCS: Final = Path(__file__).parents[1]
PICTURE: Final = DOCS / "demo.svg"
KEPT: Final = DOCS / "demo"
_INNER: Final = re.compile(r"<svg[^>]*>(.*)</svg>", re.DOTALL)
_FONTS: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_TEXT: Final = re.compile(r"<text[^>]*>([^<]*)</text>")
_MADE: Final = re.compile(r"<!-- made by python -m docs\.make\.recording from ([0-9a-f]{64}), words ([0-9a-f]{64}) -->")


def recorded(run_dir: Path) -> bytes:
    """A run's journal as the lines that a package holds of it: no secrets, no paths of this machine."""
    from uvcc_console.report import record, recording

    return recording.recording(record.RunRecord.load(run_dir))


class _AsThen(Rechecks):
    """Nothing had changed when this was recorded. The evidence itself does not lie beside the recording kept here."""

    def look(self, s: Snapshot, now: float) -> Changes:
        return {}


async def frames(run_dir: Path) -> list[str]:
    """The console's screen at moments of the recording, evenly apart, and at its end."""
    from uvcc_console.ui.app import open_app
    from uvcc_console.ui.feed.source import ReplaySource

    app = open_app(run_dir, replay=True, budget_s=60, utc=True)
    app.rechecks = _AsThen(run_dir)
    assert isinstance(app.source, ReplaySource)
    source, found = app.source, []
    async with app.run_test(size=SIZE) as pilot:
        source.playing = False
        for n in range(FRAMES):
            source.seek(source.start + (n + 0.6) * (source.end - source.start) / FRAMES)
            if n == FRAMES - 1:
                source.seek(source.end)
            app.tick()
            await pilot.pause()
            found.append(app.export_screenshot(title="uvcc demo"))
    source.close()
    return found


def replayed(folder: Path) -> list[str]:
    """The frames of a recording that lies in ``folder``."""
    from uvcc_console.report import recording

    with recording.played(folder) as run_dir:
        place = str(run_dir.parent)  # another one each time, and of no interest
        return [elsewhere(picture, place, "~/runs") for picture in asyncio.run(frames(run_dir))]


def elsewhere(picture: str, place: str, name: str) -> str:
    """The picture with another name for a folder; a text that becomes shorter keeps the width of its letters."""

    def shorter(found: re.Match[str]) -> str:
        text = found[3].replace(place, name)
        width = float(found[1]) * len(html.unescape(text)) / len(html.unescape(found[3]))
        return f'textLength="{width:g}"{found[2]}>{text}<'

    return re.sub(rf'textLength="([\d.]+)"([^<>]*)>([^<]*{re.escape(place)}[^<]*)<', shorter, picture)


def words(picture: str) -> str:
    """Everything that is written on a picture, in order."""
    return "\n".join(text for found in _TEXT.findall(picture) if (text := html.unescape(found).strip()))


def digests(folder: Path, pictures: list[str]) -> tuple[str, str]:
    """SHA-256 of the recording, and of all words on these pictures."""
    from uvcc_console.report import recording

    told = "\n".join(words(picture) for picture in pictures)
    return hashlib.sha256((folder / recording.NAME).read_bytes()).hexdigest(), hashlib.sha256(told.encode()).hexdigest()


def stated(picture: str) -> tuple[str, str]:
    """The digests that a picture names; empty ones where it names none."""
    found = _MADE.search(picture)
    return (found[1], found[2]) if found else ("", "")


def joined(pictures: list[str], made_from: tuple[str, str]) -> str:
    """One picture that shows the given ones in turn."""
    box = re.search(r'viewBox="([^"]+)"', pictures[0])
    assert box is not None
    total, share = SECONDS * len(pictures), 100 / len(pictures)
    style = (
        f".frame {{ opacity: 0; animation: turn {total:g}s step-end infinite; }} "
        f"@keyframes turn {{ 0% {{ opacity: 1; }} {share:.4f}% {{ opacity: 0; }} 100% {{ opacity: 0; }} }}"
    )
    out = [f'<svg viewBox="{box[1]}" xmlns="http://www.w3.org/2000/svg">']
    out.append(f"<!-- made by python -m docs.make.recording from {made_from[0]}, words {made_from[1]} -->")
    out.append(f"<style>{style}</style>")
    for n, picture in enumerate(pictures):
        inner = _INNER.search(picture)
        assert inner is not None
        body = _FONTS.sub("", inner[1]).replace("Fira Code", "monospace")
        body = re.sub(r"terminal-\d+", f"t{n}", body)
        body = re.sub(r"^\s+", "", re.sub(r">\s+<", "><", body), flags=re.MULTILINE)
        out.append(f'<g class="frame" style="animation-delay: {n * SECONDS:g}s">{body}</g>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main(argv: list[str]) -> int:
    """Write the picture, and with a run's folder the recording. Returns the exit code."""
    from uvcc_console.report import recording

    if argv:
        KEPT.mkdir(exist_ok=True)
        (KEPT / recording.NAME).write_bytes(recorded(Path(argv[0])))
    pictures = replayed(KEPT)
    PICTURE.write_text(joined(pictures, digests(KEPT, pictures)), encoding="utf-8")
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
