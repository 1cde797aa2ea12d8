"""One viewer's console, as a process that speaks to the page's server; its argument is the run's folder.

Read-only, and a halt wants the run's name typed. It ends when its standard input does, so that no server that was
killed leaves one behind.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

from textual import messages
from textual.driver import Driver
from textual.drivers.web_driver import WebDriver

from uvcc_console.ui.app import UvccApp
from uvcc_console.ui.app_base import own
from uvcc_console.ui.feed.source import open_source
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import complain

LEAVE_S: Final = 5.0  # a screen that has not ended so long after its viewer left is ended


class PageDriver(WebDriver):
    """Ends its app when nobody can type any more, instead of drawing for nobody."""

    def run_input_thread(self) -> None:
        super().run_input_thread()
        timer = threading.Timer(LEAVE_S, os._exit, (0,))
        timer.daemon = True
        timer.start()
        self._app.call_later(self._app.post_message, messages.ExitApp())

    def stop_application_mode(self) -> None:
        try:
            super().stop_application_mode()
        except OSError:  # the server is gone, and needs no telling
            self.exit_event.set()


class PageApp(UvccApp):
    """F9 comes through the page's packets here, so there is no terminal to look at for it."""

    def get_driver_class(self) -> type[Driver]:
        return PageDriver


def page_app(run_dir: Path) -> PageApp:
    """The console of a run for a page. Raises UnreadableError when there is no journal."""
    source, writer = open_source(run_dir, replay=False, clock=time.time, budget_s=0.03)
    app = PageApp(run_dir, source, writer, readonly=True, utc=own("utc") is True)
    app.by_name, app.place, app.alone = True, "browser", True
    return app


def main(argv: list[str]) -> int:
    """Show the run until the viewer leaves."""
    try:
        app = page_app(Path(argv[0]))
    except UvccError as e:
        complain(f"uvcc: {e}")
        return 1
    try:
        return app.run() or 0
    finally:
        app.let_go()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
