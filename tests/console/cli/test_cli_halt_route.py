"""From a request of ``uvcc halt`` to its end, over a way that the test plays."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from uvcc_console.cli.follow import headless
from uvcc_console.cli.steer import halt
from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal
from uvcc_console.haltd import order_socket
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine.shortpath import short

PODS = frozenset({"p0r0", "p1r0"})


class PlayedRoute:
    """Gives the events of each look in their order, and remembers what was asked."""

    def __init__(self, *looks: Sequence[ev.Event]) -> None:
        self._looks = list(looks)
        self.asked: list[str] = []

    def ask(self, request: ev.HaltRequested) -> None:
        self.asked.append(request.mode)

    def poll(self) -> Sequence[ev.Event]:
        return self._looks.pop(0)

    def close(self) -> None: ...


def ack(pod: str, stage: str) -> ev.HaltAck:
    return ev.HaltAck(pod=pod, nonce="n", stage=stage, step=43)


DONE = ev.HaltDone(nonce="n", mode="halt", verified=0, total=2, step=43, seconds=38.8)


@pytest.mark.parametrize(
    ("looks", "asked"),
    [
        ([[ack("p0r0", "held")], [ack("p1r0", "held")], [DONE]], ["hold", "halt"]),
        ([[ack("p0r0", "gone")], [ack("p1r0", "held")], [DONE]], ["hold", "halt"]),  # one had ended before
        ([[ack("p0r0", "gone")], [ack("p1r0", "gone")], [DONE]], ["hold"]),  # committed by the sidecar, and over
        ([[ack("p0r0", "halted"), ack("p1r0", "halted")], [DONE]], ["hold"]),
    ],
)
def test_a_hold_is_committed_while_somebody_holds_and_not_behind_its_end(
    looks: list[list[ev.Event]], asked: list[str]
) -> None:
    way = PlayedRoute(*looks)
    waiting = halt.WaitedHalt(way, ev.HaltRequested(nonce="n", mode="hold", by="cli"), PODS)
    assert waiting.run(60.0) == DONE
    assert way.asked == asked


LATE = ev.Alert(level="warn", name="halt_release_late", text="the halt is committed; a release comes too late")


@pytest.mark.parametrize("told", [LATE, DONE], ids=["while it is halted", "as it ends"])
def test_a_release_that_comes_too_late_says_so_at_once(told: ev.Event) -> None:
    """It waited two minutes for a verdict that nobody would give."""
    asked = ev.HaltRequested(nonce="n", mode="release", by="cli")
    waiting = halt.WaitedHalt(PlayedRoute([ack("p0r0", "halted")], [told]), asked, PODS)
    with pytest.raises(UvccError, match="a release comes too late"):
        waiting.run(60.0)


@pytest.mark.parametrize(
    ("asked", "done", "word", "code"),
    [
        (
            ev.HaltRequested(nonce="n", mode="hold", by="cli"),
            replace(DONE, mode="release", verified=2),
            "RELEASE 2/2",
            0,
        ),
        (ev.HaltRequested(nonce="n", mode="hold", by="cli", drill=True), replace(DONE, verified=2), "HALT 2/2", 1),
        (ev.HaltRequested(nonce="n", mode="release", by="cli"), replace(DONE, mode="hold", verified=2), "HOLD 2/2", 0),
    ],
    ids=["somebody else released it", "the drill met a halt", "it was a drill's hold"],
)
def test_a_verdict_of_another_kind_than_asked_for_ends_the_waiting(
    asked: ev.HaltRequested, done: ev.HaltDone, word: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was waited for until two minutes had passed, in silence."""
    waiting = halt.WaitedHalt(PlayedRoute([done]), asked, PODS)
    assert waiting.run(60.0) == done
    assert halt.report(done, waiting.mode, asked, False, waiting.gone, "r") == code
    assert word in capsys.readouterr().out


def test_what_the_sidecar_says_together_with_its_receipt_is_heard(tmp_path: Path) -> None:
    """Where every worker has ended, the verdict comes within milliseconds, and in one piece with the receipt."""
    asked = ev.HaltRequested(nonce="n", mode="hold", by="cli", drill=True)

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short(tmp_path / order_socket.SOCKET) as path:
        listener.bind(path)
    listener.listen()

    def serve() -> None:
        line, _ = listener.accept()
        line.recv(1 << 16)
        events = [ack("p0r0", "gone"), DONE]
        rows = [{"taken": "n"}, *({"kind": e.kind, "ts": 1.0, "data": ev.to_json(e)} for e in events)]
        line.sendall(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        line.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    client = order_socket.OrderClient(tmp_path)
    heard = client.ask(asked)
    client.close()
    thread.join()
    listener.close()
    assert [e.kind for e in heard] == [ev.HaltAck.kind, ev.HaltDone.kind]


@pytest.mark.parametrize("written", [False, True], ids=["unwritten", "written"])
def test_an_order_that_died_with_its_sidecar_is_given_again(
    written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal was shut when it came by the door: the next sidecar knew nothing of it, and two minutes passed."""
    asked = ev.HaltRequested(nonce="n", mode="hold", by="cli")
    journal = Journal(tmp_path / processes.JOURNAL, source="t")
    if written:
        journal.append(asked)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short(tmp_path / order_socket.SOCKET) as path:
        listener.bind(path)
    listener.listen()

    def serve() -> None:
        line, _ = listener.accept()
        line.recv(1 << 16)
        line.sendall(b'{"taken": "n"}\n')
        line.close()

    thread = threading.Thread(target=serve)
    thread.start()
    again, started = PlayedRoute([DONE]), []
    monkeypatch.setattr(processes, "start", lambda _, name: started.append(name))
    way = halt.open_route(tmp_path)
    monkeypatch.setattr(halt, "open_route", lambda _: again)
    started.clear()
    waiting = halt.WaitedHalt(way, asked, PODS)
    thread.join()
    listener.close()
    if written:
        journal.append(DONE)
    done = waiting.run(60.0)
    assert done is not None
    assert replace(done, ts=0.0) == DONE
    way.close()
    journal.close()
    assert (again.asked, started) == (([], ["haltd"]) if written else (["hold"], []))
    assert ("it is given again" in capsys.readouterr().err) is not written


def test_without_a_verdict_the_command_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said that the ladder goes on where another order had taken its place, and where the run was over."""
    pod = ev.PodChanged(pod="p0r0", party=0, replica=0, provider="t", state="agent", address="a")
    created = ev.RunCreated(
        run="r", profile_name="t", job_kind="lm", replicas=1, pipeline_stages=1, tensor=1, stages=[]
    )
    before = fold([created, pod])
    told: list[tuple[list[ev.Event], str]] = [
        ([], "no verdict yet; the ladder goes on"),
        ([ev.HaltRequested(nonce="other", mode="halt", by="f9")], "no verdict, f9 asked for another halt since"),
        ([ev.RunEnded(status="failed")], "no verdict, the run has ended"),
    ]
    for since, text in told:
        views = iter([before, fold(since, before)])
        monkeypatch.setattr(halt, "halt_snapshot", lambda _, views=views: next(views))
        monkeypatch.setattr(halt.common, "find_run", Path)
        looks = [[e for e in since if isinstance(e, ev.RunEnded)], *[[] for _ in range(50)]]
        monkeypatch.setattr(halt, "open_route", lambda _, looks=looks: PlayedRoute(*looks))
        assert halt.run(["r", "--drill", "--timeout", "0.05"]) == 1
        assert f"DRILL: {text}" in capsys.readouterr().err


def test_a_long_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(halt, "QUIET_S", 0.0)
    asked = ev.HaltRequested(nonce="n", mode="hold", by="cli", drill=True)
    halt.WaitedHalt(PlayedRoute([ack("p0r0", "held")], [DONE]), asked, PODS).run(60.0)
    assert "waiting for p1r0, for 60 s more at most" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verified", "gone", "step", "said", "then"),
    [
        (2, 2, 43, "HALT 2/2 verified at step 43, 38.8 s", ""),
        (0, 2, 43, "HALT 0/2 verified, 2 without a checkpoint at step 43, 38.8 s", "uvcc resume r goes back to"),
        (0, 2, -1, "HALT 0/2 verified, 2 without a checkpoint, 38.8 s", "uvcc resume r goes back to"),
        (0, 1, 43, "HALT 0/2 verified, 1 without a checkpoint, 1 UNKNOWN at step 43, 38.8 s", "uvcc halt r repeats"),
        (0, 0, 43, "HALT 0/2 verified, 2 UNKNOWN at step 43, 38.8 s", "uvcc halt r repeats"),
    ],
)
def test_a_pod_that_is_proven_gone_is_not_called_unknown(
    verified: int, gone: int, step: int, said: str, then: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = ev.HaltDone(nonce="n", mode="halt", verified=verified, total=2, step=step, seconds=38.8)
    asked = ev.HaltRequested(nonce="n", mode="hold", by="cli")
    assert halt.report(done, "halt", asked, False, gone, "r") == (0 if verified == 2 else 1)
    told = capsys.readouterr()
    assert told.out.strip() == said
    assert told.err.startswith(then) if then else not told.err


def test_who_follows_without_a_screen_is_told_of_grave_alerts_and_not_of_history() -> None:
    out = io.StringIO()
    printer = headless.Printer(out)
    for level, ts in (("error", 99.0), ("warn", 101.0), ("error", 101.0)):
        alert = ev.Alert(ts=ts, level=level, name="relay_away", text=f"away \x1b[31m{ts}", hint="F9", subject="p0r0")
        headless.tell_of_alert(printer, alert, 100.0)
    assert out.getvalue() == "alert relay_away: p0r0: away 101.0 (F9)\n"
