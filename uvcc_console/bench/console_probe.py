"""The process that ``uvcc bench console`` looks at: the real console in a terminal, with a note of every tick."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from uvcc_console.ui.app import UvccApp
from uvcc_console.ui.feed.source import open_source
from uvcc_console.ui.halting.pauses import orders_first
from uvcc_console.ui.panels.log_view import LogView


class ScreenProbe(UvccApp):
    """Writes, once a second, how many lines it has taken and how long its longest pause between ticks was."""

    def __init__(self, *args: Any, report: Path, **options: Any) -> None:
        super().__init__(*args, **options)
        self._report = report
        self._last = time.perf_counter()
        self._gaps: list[float] = []
        self._written = 0.0

    def tick(self) -> None:
        now = time.perf_counter()
        self._gaps.append(now - self._last)
        self._last = now
        super().tick()
        if now - self._written > 0.5 and self.main.ready:
            self._written = now
            ring = self.main.query_one(LogView).ring
            record = {"lines": ring.total + ring.dropped, "gap": max(self._gaps[-200:]), "at": time.time()}
            partial = self._report.with_suffix(".part")
            partial.write_text(json.dumps(record))
            partial.replace(self._report)


def main() -> int:
    """``python -m uvcc_console.bench.console_probe RUN_DIR REPORT``."""
    run_dir, report = Path(sys.argv[1]), Path(sys.argv[2])
    source, writer = open_source(run_dir, replay=False, clock=time.time, budget_s=0.03)
    app = ScreenProbe(run_dir, source, writer, report=report)
    with orders_first() as app.pauses:
        return app.run() or 0


if __name__ == "__main__":
    sys.exit(main())
