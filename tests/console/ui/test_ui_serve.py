"""The console in a browser: who is let in, what a viewer may do, and that nothing of a viewer stays behind."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, WSMsgType, WSServerHandshakeError
from aiohttp.test_utils import TestClient, TestServer
from ui_desk import desk, modes, typed
from ui_journals import Story

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.ui.actions import typing_offers
from uvcc_console.ui.app import UvccApp
from uvcc_console.ui.feed import kept_layout
from uvcc_console.ui.panels.charts import ChartsPanel
from uvcc_console.ui.registry.keys import ACTIONS
from uvcc_console.ui.web import packets, page_viewer
from uvcc_console.ui.web.page_guard import KEYS, PageGuard, bindable, hosts
from uvcc_console.ui.web.page_server import FILES, RunPage, viewer_command
from uvcc_engine.contract.errors import ConfigError

# a viewer that says its name, echoes what it gets and ends with its standard input, as the real one does
ECHO = """
import os, sys
def tell(kind, data): os.write(1, kind + len(data).to_bytes(4, "big") + data)
os.write(1, b"__GANGLION__\\n")
tell(b"M", b'{"type": "deliver_file_start", "key": "k"}')
tell(b"D", b"pid=%d size=%sx%s;" % (os.getpid(), os.environ["COLUMNS"].encode(), os.environ["ROWS"].encode()))
while data := os.read(0, 65536): tell(b"D", data)
"""
STUBBORN = ECHO.replace(
    "while data",
    "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(60)\nwhile data",
)


class Visit:
    """A page's server with a made-up viewer, and a browser of the test's own making."""

    def __init__(self, page: RunPage, client: TestClient) -> None:  # type: ignore[type-arg]
        self.page, self.client = page, client
        self.host = next(iter(page.guard.hosts))
        self.page_headers = {"Host": self.host, "Origin": f"http://{self.host}"}

    async def key(self, token: object = None) -> str:
        token = self.page.guard.token if token is None else token
        answer = await self.client.post("/session", json={"token": token}, headers=self.page_headers)
        return (await answer.json())["key"] if answer.status == 200 else f"{answer.status} {await answer.text()}"

    def socket(self, key: str, where: str = "/ws?width=100&height=30", **headers: str):  # type: ignore[no-untyped-def]
        return self.client.ws_connect(where, protocols=("uvcc", f"uvcc-key.{key}"), headers=self.page_headers | headers)


@asynccontextmanager
async def visit(code: str = ECHO, viewers: int = 4) -> AsyncIterator[Visit]:
    page = RunPage(PageGuard(frozenset({"127.0.0.1:8000", "localhost:8000"})), (sys.executable, "-c", code), viewers)
    async with TestClient(TestServer(page.app())) as client:
        yield Visit(page, client)


async def said(socket, until: bytes) -> bytes:  # type: ignore[no-untyped-def]
    heard = b""
    while until not in heard:
        message = await asyncio.wait_for(socket.receive(), 120)
        assert message.type in (WSMsgType.BINARY, WSMsgType.TEXT), message
        assert b"deliver_file" not in (message.data if isinstance(message.data, bytes) else message.data.encode())
        heard += message.data if message.type == WSMsgType.BINARY else b""
    return heard


async def gone(pid: int) -> None:
    async with asyncio.timeout(120):
        while Path(f"/proc/{pid}").exists() if sys.platform == "linux" else _lives(pid):
            await asyncio.sleep(0.02)


async def forgotten(page: RunPage) -> None:
    """Until the server has taken note of every end; a process is gone a moment before that."""
    async with asyncio.timeout(120):
        while page.living:
            await asyncio.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# ---- who is let in


async def test_a_key_for_the_token_and_a_viewer_for_the_key() -> None:
    async with visit() as v:
        key = await v.key()
        assert await v.key(key) == key  # a page that is loaded again
        assert v.page.guard.token not in key
        async with v.socket(key) as socket:
            assert socket.protocol == "uvcc"
            pid = int(re.findall(rb"pid=(\d+) size=100x30;", await said(socket, b";"))[0])
            await socket.send_str('["stdin", "\\u001b[20~"]')
            assert (await said(socket, b"\x1b[20~")).endswith(b"D\0\0\0\5\x1b[20~")
            await socket.send_str('["ping", "17"]')
            assert (await socket.receive_json()) == ["pong", "17"]
        await gone(pid)
        await forgotten(v.page)


@pytest.mark.parametrize("token", ["", "wrong", 7, None, ["x"], {"token": 1}, "\ud800"])
async def test_a_wrong_token_gets_no_key(token: object) -> None:
    async with visit() as v:
        wrong = {"token": token} if token is not None else []
        answer = await v.client.post("/session", json=wrong, headers=v.page_headers)
        assert answer.status == 403
        for key in ("", "wrong", v.page.guard.token):  # nor is the token itself a key
            with pytest.raises(WSServerHandshakeError) as refused:
                await v.socket(key)
            assert refused.value.status == 403
        assert not v.page.living


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1", "127.0.0.1:8001", "[::1]:8000"])
async def test_another_name_for_the_address_gets_nothing(host: str) -> None:
    async with visit() as v:
        key = await v.key()
        for path in FILES:
            answer = await v.client.get(path, headers={"Host": host})
            assert (answer.status, await answer.text()) == (403, "this address is not that of the page")
        with pytest.raises(WSServerHandshakeError):
            await v.socket(key, Host=host, Origin=f"http://{host}")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "", "https://127.0.0.1:8000", "http://localhost:8000x"]
)
async def test_another_page_gets_neither_key_nor_viewer(origin: str) -> None:
    async with visit() as v:
        key = await v.key()
        headers = v.page_headers | {"Origin": origin}
        answer = await v.client.post("/session", json={"token": v.page.guard.token}, headers=headers)
        assert (answer.status, await answer.text()) == (403, "another page asks")
        with pytest.raises(WSServerHandshakeError):
            await v.socket(key, Origin=origin)
        del headers["Origin"]
        async with ClientSession() as plain:
            answer = await plain.post(
                v.client.make_url("/session"), json={"token": v.page.guard.token}, headers=headers
            )
            assert answer.status == 403


async def test_the_page_fetches_nothing_from_elsewhere_and_sets_no_cookie() -> None:
    async with visit() as v:
        for path in FILES:
            answer = await v.client.get(path, headers={"Host": v.host})
            assert answer.status == 200
            assert "Set-Cookie" not in answer.headers
            rules = answer.headers["Content-Security-Policy"]
            assert set(re.findall(r"\w+://[^ ;]+", rules)) == {f"ws://{v.host}"}
            assert "default-src 'none'" in rules
            assert "script-src 'self';" in rules
            if path in ("/", "/page.js", "/page.css"):
                assert not re.search(rb"https?://|\bon\w+=|<script>", await answer.read())
        for other in ("/static", "/textual.js/x", "/download/k", "/index.html"):
            assert (await v.client.get(other, headers={"Host": v.host})).status == 404


def test_it_listens_beyond_this_machine_only_when_told_to() -> None:
    assert bindable("127.0.0.1", exposed=False) == bindable("localhost", exposed=False) == "127.0.0.1"
    assert bindable("10.0.0.5", exposed=True) == "10.0.0.5"
    for address, exposed in (("10.0.0.5", False), ("0.0.0.0", True), ("::", True), ("example.org", True)):
        with pytest.raises(ConfigError):
            bindable(address, exposed=exposed)
    assert hosts("127.0.0.1", 8000) == {"127.0.0.1:8000", "localhost:8000"}
    assert hosts("::1", 80) == {"[::1]:80", "localhost:80", "[::1]", "localhost"}
    assert hosts("10.0.0.5", 8000) == {"10.0.0.5:8000"}


def test_the_verb_says_why_it_does_not_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from uvcc_console.core import paths

    Story().full(3).write(paths.runs_dir() / "digits-1")
    assert main(["serve", "digits-1", "--address", "192.0.2.1"]) == 2
    assert "can be reached from other machines" in capsys.readouterr().err


def test_keys_are_forgotten_the_oldest_first() -> None:
    guard = PageGuard(frozenset())
    keys = [guard.exchange(guard.token) for _ in range(KEYS + 1)]
    assert not guard.knows(f"uvcc, uvcc-key.{keys[0]}")
    assert guard.knows(f"uvcc, uvcc-key.{keys[-1]}")
    assert len(set(keys)) == KEYS + 1


# ---- viewers and their processes


async def test_a_viewer_too_many_is_told_so_and_others_go_on() -> None:
    async with visit(viewers=1) as v:
        key = await v.key()
        async with v.socket(key) as socket:
            await said(socket, b";")
            assert await v.key() == "503 1 viewers look at this run already: close one of them."
            with pytest.raises(WSServerHandshakeError) as refused:
                await v.socket(key)
            assert refused.value.status == 503
            await socket.send_str('["stdin", "still"]')
            await said(socket, b"still")


@pytest.mark.parametrize("message", ["[]", "{", '["stdin", 7]', '["resize", {"width": "x", "height": 3}]', '["quit"]'])
async def test_what_no_page_sends_ends_the_viewer(message: str) -> None:
    async with visit() as v:
        async with v.socket(await v.key()) as socket:
            pid = int(re.findall(rb"pid=(\d+)", await said(socket, b";"))[0])
            await socket.send_str(message)
            while not socket.closed:
                await asyncio.wait_for(socket.receive(), 120)
            assert socket.close_code == 1008
        await gone(pid)


async def test_a_viewer_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvcc_console.ui.web.page_server.END_S", 0.1)
    async with visit(STUBBORN) as v, v.socket(await v.key()) as socket:
        pid = int(re.findall(rb"pid=(\d+)", await said(socket, b";"))[0])
        await socket.close()
        await gone(pid)


async def test_sizes_stay_within_bounds() -> None:
    assert packets.size("999999999999", "-5") == packets.Resized(500, 5)
    assert packets.size("x", "5") is packets.size(None, None) is None
    assert packets.parse('["stdin", "' + "x" * packets.LARGEST + '"]') is None
    assert packets.parse("[" * 60000) is None


async def test_the_real_viewer_draws_the_run_and_ends_with_its_connection(tmp_path: Path) -> None:
    story = Story().full(5)
    story.write(tmp_path)
    async with visit() as v:
        v.page.command = viewer_command(tmp_path)
        async with v.socket(await v.key()) as socket:
            heard = await said(socket, b"read-only")
            assert b"Fleet" in heard
            (viewer,) = v.page.living
            pid = viewer.pid
        await gone(pid)
        await forgotten(v.page)


# ---- read-only


async def test_read_only_releases_only_its_own_hold_and_writes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("uvcc_console.ui.app.operators_program", lambda: asked.append("program"))
    async with desk(Story().full(5), tmp_path / "other"):
        assert asked == ["program"]
    async with desk(Story().full(5), tmp_path / "run", readonly=True) as d:
        before = {p.name for p in (tmp_path / "run").iterdir()}
        assert asked == ["program"]  # no further time: nobody is notified by this console
        d.app.keeps_layout = True
        assert not d.app.remembers
        d.append(ev.HaltRequested(nonce="b" * 16, mode="hold", by="bob"))
        await d.press("escape")
        assert modes(d) == [("hold", "b" * 16)]
        assert "only a hold asked for here" in d.toasts
        d.append(ev.HaltRequested(nonce="b" * 16, mode="release", by="bob"))
        d.app.commands.take(["a line"], True)
        assert "read-only" in d.toasts
        await d.press("f9")
        await d.press("escape")
        assert [mode for mode, _ in modes(d)] == ["hold", "release", "hold", "release"]
        after = {p.name for p in (tmp_path / "run").iterdir()}
        assert {name for name in after - before if "journal" not in name} == set()
        d.app.exit()
    assert not kept_layout.path().exists()


@pytest.mark.parametrize(
    "story", [Story().full(5), pytest.param(Story().failed(), marks=pytest.mark.ci(__file__))], ids=["full", "failed"]
)
async def test_no_action_of_a_read_only_console_writes(
    tmp_path: Path, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(UvccApp, "suspend", lambda _: started.append("shell"))
    monkeypatch.setattr(UvccApp, "forward_tensorboard", lambda _, pod: started.append("tensorboard"))
    async with desk(story, tmp_path / "run", size=(80, 24), readonly=True) as d:
        before = dict(iter_events(tmp_path / "run" / "journal.sqlite"))
        files = _files(tmp_path)
        for action in ACTIONS.values():
            if action.id in ("halt", "detach", "palette"):  # a halt is meant; leaving ends this; its list is these
                continue
            d.app.commands.run(action, by_key=False)
            while len(d.app.screen_stack) > 1:
                await d.pilot.pause()
                await d.app.pop_screen()
        await d.settle()
        d.app.commands.do_resume("")  # as if an action had forgotten to ask
        await d.settle()
        assert "read-only" in d.toasts
        assert dict(iter_events(tmp_path / "run" / "journal.sqlite")) == before
        assert (started, _files(tmp_path)) == ([], files)


def _files(folder: Path) -> set[str]:
    return {str(p) for p in folder.rglob("*") if "journal" not in p.name}


async def test_a_page_shows_one_run(tmp_path: Path) -> None:
    Story().full(3).write(tmp_path / "other")
    async with desk(Story().full(5), tmp_path / "run", readonly=True) as d:
        assert typing_offers.words(d.app, "command", "compare ") == ["other"]
        d.app.alone = True
        assert typing_offers.words(d.app, "command", "compare ") == []
        d.app.commands.do_compare("other")
        d.app.commands.next_other()
        await d.settle()
        assert d.toasts.count("this page shows one run") == 2
        assert not d.app.main.query_one(ChartsPanel).look.others
    assert page_viewer.page_app(tmp_path / "run").alone


async def test_in_a_page_f9_wants_the_runs_name(tmp_path: Path) -> None:
    async with desk(Story().full(5), tmp_path / "run", readonly=True) as d:
        d.app.by_name, d.app.place = True, "browser"
        await d.press("f9")
        assert modes(d) == []
        await d.press("escape")
        await d.press("f9")
        await d.press(*typed("not-it"), "enter")
        assert modes(d) == []
        await d.press("escape")
        await d.press("f9")
        await d.press(*typed(d.app.snap.run), "enter")
        ((mode, nonce),) = modes(d)
        assert (mode, len(nonce)) == ("halt", 16)
        assert d.asked(ev.HaltRequested)[-1].by.endswith(" browser")
        d.append(ev.RunEnded(status="ok"))
        await d.settle()
        await d.press("f9")
        assert "nothing to halt: the run has ended" in d.toasts
        assert modes(d) == [(mode, nonce)]
