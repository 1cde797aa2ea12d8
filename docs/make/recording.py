"""``python -m docs.make.recording RUN_DIR [FILE]``: a recorded run as one animated picture, from the console's replay.

The picture is SVG with CSS alone: no script, and nothing that is fetched. Every frame is what the console shows of the
run's journal at that moment.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Final

FRAMES: Final = 12
SECONDS: Final = 2.0
SIZE: Final = (110, 30)
_INNER: Final = re.compile(r"<svg[^>]*>(.*)</svg>", re.DOTALL)
_FONTS: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


async def frames(run_dir: Path) -> list[str]:
    """The console's screen at moments of the recording, evenly apart, and at its end."""
    from uvcc_console.ui.app import open_app
    from uvcc_console.ui.feed.source import ReplaySource

    app = open_app(run_dir, replay=True, budget_s=60, utc=True)
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


def joined(pictures: list[str]) -> str:
    """One picture that shows the given ones in turn."""
    box = re.search(r'viewBox="([^"]+)"', pictures[0])
    assert box is not None
    total, share = SECONDS * len(pictures), 100 / len(pictures)
    style = (
        f".frame {{ opacity: 0; animation: turn {total:g}s step-end infinite; }} "
        f"@keyframes turn {{ 0% {{ opacity: 1; }} {share:.4f}% {{ opacity: 0; }} 100% {{ opacity: 0; }} }}"
    )
    out = [f'<svg viewBox="{box[1]}" xmlns="http://www.w3.org/2000/svg">', f"<style>{style}</style>"]
    for n, picture in enumerate(pictures):
        inner = _INNER.search(picture)
        assert inner is not None
        body = _FONTS.sub("", inner[1]).replace("Fira Code", "monospace")
        body = re.sub(r"terminal-\d+", f"t{n}", body)
        body = re.sub(r"^\s+", "", re.sub(r">\s+<", "><", body), flags=re.MULTILINE)
        out.append(f'<g class="frame" style="animation-delay: {n * SECONDS:g}s">{body}</g>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main(argv: list[str]) -> int:
    """Write the picture. Returns the exit code."""
    target = Path(argv[1]) if len(argv) > 1 else Path(__file__).parents[1] / "demo.svg"
    target.write_text(joined(asyncio.run(frames(Path(argv[0])))), encoding="utf-8")
    print(f"{target}: {target.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
