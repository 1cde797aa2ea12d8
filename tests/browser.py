"""A headless Chromium, driven over its own pipe (``--remote-debugging-pipe``): no driver, no port, no network."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-features=Translate,OptimizationHints,MediaRouter", "--no-default-browser-check", "--mute-audio"),
)


def found() -> str:
    """The browser's path, "" if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), "")


def why_not() -> str:
    """Why there is no browser; "" if there is one. .ci/run installs it where that can be done."""
    if found():
        return ""
    able = hasattr(os, "getuid") and os.getuid() == 0 and shutil.which("apt-get")
    return "no chromium, which .ci/run installs" if able else "no chromium, and it cannot be installed here"


class Tab:
    """One page. ``events``: everything that the browser told of it."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._last, self.session = to, back, b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, **params: Any) -> Any:
        """Ask and wait for the answer."""
        self._last += 1
        asked = {"id": self._last, "method": method, "params": params}
        os.write(self._to, json.dumps(asked | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            heard = self._next()
            if heard.get("id") == self._last:
                assert "error" not in heard, heard
                return heard["result"]

    def wait(self, method: str) -> None:
        """Until the browser tells this of the page."""
        while all(e["method"] != method for e in self.events):
            self._next()

    def value(self, script: str) -> Any:
        """What a script gives; it runs with the tools of developers, whatever the page allows itself."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._back, 1 << 20)
            assert more, "the browser is gone"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(text)
        if "method" in heard:
            self.events.append(heard)
        return heard


def _high(ends: tuple[int, int]) -> tuple[int, int]:
    """The same pipe at numbers that stand in nobody's way."""
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """A browser with one empty page; its profile lies in ``folder``."""
    (there, to), (back, here) = _high(os.pipe()), _high(os.pipe())
    more = ["--no-sandbox"] if os.getuid() == 0 else []
    command = [found(), *_FLAGS, *more, f"--user-data-dir={folder}", "about:blank"]
    browser = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{there} 4>&{here}', "bash", *command],  # it reads at 3 and writes at 4
        pass_fds=(there, here),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(there)
    os.close(here)
    try:
        page = Tab(to, back)
        target = page.ask("Target.createTarget", url="about:blank")["targetId"]
        page.session = page.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.ask(f"{domain}.enable")
        yield page
        page.session = ""
        page.ask("Browser.close")
    finally:
        os.close(to)
        os.close(back)
        end = time.monotonic() + 10
        while browser.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        if browser.poll() is None:
            browser.kill()
        browser.wait()
