"""Every verb over a run whose every word from outside holds what terminals obey: none of it reaches standard output."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_run import RUN, START, make_run

from uvcc_console.cli.follow import headless
from uvcc_console.cli.main import main
from uvcc_console.cli.screen import attach
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.fleet import provider_kinds as providers
from uvcc_console.fleet.provider import Pod
from uvcc_engine.bench.work import rehearsal
from uvcc_engine.cli import main as engine_main
from uvcc_engine.contract.errors import UnreachableError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty

POISON = (
    "\x1b[31mevil\x1b]0;title\x07\x1b]52;c;eA==\x1b\\\x9b2J\x9d0;t\x9c\x00\x08\x7f\x85\u202e\u202a\u2066\u2069\u200b\u200f"
    "\u2028\u2029\ufeff\r\n[red]bold[/red][@click=app.bell]x[/] {0} %s $\\frac{\tforged: ok"
    "<img src=x> ![a](http://picture/) |cell|"
)
MARKDOWN = re.compile(r"(?<!\\)<img|\]\(http|(?<!\\)\|cell")
BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
# what a console decides itself, and what names the parts of the made-up run
KEPT = ("run", "job_kind", "phase", "engine_run", "state", "coord", "pod", "path", "mode", "stage", "nonce", "split")
KEPT += ("level", "action", "status", "profile", "identity", "global_root", "result_hash", "sid_job", "bundle")


def poisoned(value: Any, key: str = "") -> Any:
    """The same with poison behind every text."""
    if isinstance(value, str):
        return value if key in KEPT else value + POISON
    if isinstance(value, dict):
        return {k if key in ("", "pairs") else k + POISON: poisoned(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v, key) for v in value]
    return value


def hostile_policy(identities: Any, topology: Any, steps: int, nonce: str = "00" * 32) -> Policy:
    """What three domains signed, one of them with escapes in its words."""
    words = ("north\x1b[31m\x9b2J", "eu\u202e\x1b]0;t\x07")
    return Policy.build(
        job={"kind": "private", "steps": steps, "note": "x\x1b[2J\u2066"},
        model_hash="ab" * 32,
        code_hash=rehearsal.CODE_HASH,
        topology=topology,
        parties=[PolicyParty(p, identities[p].public, *words) for p in range(PARTIES)],
        owner="clinic\x1b[31m\u202e",
        commitments=[rehearsal.commitment(p) for p in range(PARTIES)],
        reveal=["loss", "accuracy"],
        limits={"total": 0},
        nonce=nonce,
    )


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of ours; the journal is as an older console may have left it, its text raw."""
    monkeypatch.setattr(rehearsal, "make_policy", hostile_policy)
    folder = Path(os.environ["UVCC_HOME"]) / "runs" / RUN
    make_run(folder)
    path = folder / "journal.sqlite"
    journal = Journal(path)
    events = [event for _, event in journal.since(0)]
    journal.close()
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("DELETE FROM events")

    def put(event: ev.Event, data: dict[str, Any]) -> None:
        row = (event.ts or START, "x", event.kind, json.dumps(data))
        db.execute("INSERT INTO events(ts, source, kind, data) VALUES (?,?,?,?)", row)

    for event in events[:-1]:
        put(event, poisoned(ev.to_json(event)))
        for extra in EXTRA.get(type(event), ()):
            put(dataclasses.replace(extra, ts=event.ts), ev.to_json(extra))
    put(events[-1], poisoned(ev.to_json(events[-1])) | {"leaks": [f"uvcc-x{POISON}"]})
    db.close()
    (folder / "conductor.log").touch()
    logged = {"ts": START, "level": POISON, "message": POISON, "pod": POISON, "trace": POISON, "error": POISON}
    (folder / "haltd.jsonl").write_text(json.dumps(logged) + "\n")
    for log in folder.rglob("*.log"):
        log.write_text(f"fine\n{POISON}\n")
    for info in folder.rglob("run.info"):
        info.write_text(f"run: {RUN}.full\ndevice: cpu{POISON}\n")
    return folder


EXTRA: dict[type[ev.Event], list[ev.Event]] = {
    ev.RunCreated: [
        ev.Alert(level="warn", name=POISON, text=POISON, hint=POISON, subject=POISON),
        ev.StageChanged(name=f"stage{POISON}", status="failed", detail=POISON),
        ev.GateMeasured(name=POISON, ok=False, wanted=POISON, measured=POISON),
        ev.Consent(what=POISON, by=POISON),
        ev.LinesMalformed(where=POISON, count=2, src=POISON, sample=POISON),
        ev.ActionDone(action=POISON, pod=POISON, ok=False, detail=POISON),
        ev.FlightRead(folder=POISON, newest={POISON: POISON}, silent=[POISON], findings=[POISON]),
        ev.TriageTried(rung=POISON, step=3, by=POISON),
    ],
    ev.PhaseStarted: [
        ev.PodChanged(pod=f"p9{POISON}", party=9, replica=0, provider=POISON, state=POISON, address=POISON),
        ev.LinkChanged(pod="p0r0", path=POISON, up=False, detail=POISON),
        ev.WorkerProcess(pod="p0r0", coord=f"p0r0s0t0{POISON}", state="exited", rc=1, signal=POISON),
        ev.HeartbeatRead(
            pod="p0r0", coord=f"p0r0s0t1{POISON}", record={POISON: POISON, "phase": POISON, "msg": POISON}
        ),
        ev.Metric(coord=POISON, step=1, values={f"loss{POISON}": float("nan"), "loss": float("inf")}),
        ev.EngineEvent(pod="p0r0", level=POISON, event=POISON, fields={POISON: {POISON: [POISON]}}),
        ev.EngineEvent(pod="p0r0", level="info", event="waiting", fields={"coord": POISON, "peer": POISON}),
        ev.LogLines(pod=POISON, src=POISON, lines=[POISON, POISON]),
        ev.RootReported(coord=POISON, epoch=0, root=POISON, pairs={POISON: POISON}),
        ev.ForkDetected(epoch=1, parties=[0, 1], detail=POISON),
        ev.HaltRequested(nonce="n", mode="hold", by=POISON, reason=POISON),
        ev.HaltAck(pod=POISON, nonce="n", stage=POISON, checkpoint=POISON, detail=POISON),
        ev.HaltDone(nonce="n", mode="hold", verified=1, total=3, step=1, seconds=1.0),
    ],
}


class Shop:
    """A provider whose words are as bad."""

    async def list(self, prefix: str) -> list[Pod]:
        good = Pod(f"uvcc-{RUN}-p0r0", 0, 0, f"local{POISON}", f"id{POISON}", host=f"h{POISON}", region=POISON)
        return [good, Pod(f"uvcc-{POISON}", 0, 0, POISON, POISON)]

    async def delete(self, pod: Pod) -> None:
        raise UnreachableError(f"pod {pod.name} is not gone: {POISON}", POISON)

    async def close(self) -> None:
        pass


def verb(*argv: str) -> Callable[[Path], object]:
    return lambda folder: main([a.replace("FOLDER", str(folder)) for a in argv])


VERBS: dict[str, Callable[[Path], object]] = {
    " ".join(argv): verb(*argv)
    for argv in (
        ("runs",),
        ("runs", "--json"),
        ("status", RUN),
        ("status", RUN, "--json"),
        ("logs", RUN),
        ("logs", RUN, "--json"),
        ("watch", RUN, "--no-follow"),
        ("attach", RUN, "--json"),
        ("attach", RUN, "--headless"),
        ("verify", "FOLDER/artifacts/full"),
        ("verify", "FOLDER/artifacts/full", "--json"),
        ("verify", "FOLDER/artifacts/nothing\x1b[31m"),
        ("bundle", RUN),
        ("bundle", RUN, "--json"),
        ("figures", RUN),
        ("compare", "FOLDER/artifacts/full", "FOLDER/artifacts/nothing\x1b[31m"),
        ("package", RUN, "--format", "zip", "--output", "FOLDER/package.zip"),
        ("handoff", RUN),
        ("handoff", RUN, "--json"),
        ("halt", RUN),
        ("resume", RUN),
        ("teardown", RUN),
        ("teardown", RUN, "--json"),
        ("pod", RUN, "fetch", "p0r0"),
        ("tensorboard", RUN, "--pod", f"x{POISON}"),
        ("domain", "consent", RUN, "full"),
        ("domain", "export", RUN, "--party", "0", "FOLDER/out"),
        ("pods",),
        ("pods", "--json"),
        ("pods", "--sweep"),
        ("paths",),
        ("doctor",),
        ("profiles",),
        ("profiles", "show", "demo"),
        ("profiles", "show", f"none{POISON}"),
        ("rollout", f"none{POISON}", "--yes"),
        ("status", f"none{POISON}"),
        (f"none{POISON}",),
        ("runs", f"--{POISON}"),
    )
}
VERBS["uvcc-engine verify"] = lambda folder: engine_main(["verify", str(folder / "artifacts" / "full")])


def words(text: str) -> list[str]:
    return [f"{m.group()!r} in {text[max(0, m.start() - 30) : m.end() + 10]!r}" for m in BAD.finditer(text)]


@pytest.mark.parametrize("what", VERBS)
def test_no_verb_says_what_a_terminal_obeys(
    what: str, run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "provider_for", lambda *a, **k: Shop())
    with contextlib.suppress(SystemExit):  # wrong usage
        VERBS[what](run_dir)
    said = capsys.readouterr()
    assert words(said.out) == []
    assert words(said.err) == []
    assert said.out or said.err
    if "--json" in what or what.startswith("watch"):
        for text in [said.out] if said.out.startswith(("{\n", "[")) else said.out.splitlines():
            json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
            assert text.isascii()


def test_what_was_poisoned_is_still_told(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test would see an escape: the words beside it are there."""
    main(["status", RUN])
    assert "evil" in capsys.readouterr().out
    assert main(["verify", str(run_dir / "artifacts" / "full")]) == 0
    assert "north" in capsys.readouterr().out
    main(["handoff", RUN])
    assert "run.info was changed" in capsys.readouterr().out  # so it is named, and not quoted


def test_the_files_that_people_read_hold_none_of_it(run_dir: Path) -> None:
    words_around = "a long line of harmless words, so that nobody takes it for a share; " * 4
    for path in (*run_dir.rglob("*.log"), *run_dir.rglob("run.info")):  # POISON itself is refused as binary
        path.write_text(f"device: {words_around}\x1b[31m{words_around}\u202e\x9b2J\n")
    assert main(["bundle", RUN]) == 0
    assert main(["handoff", RUN]) == 0
    assert main(["figures", RUN]) == 0
    artifacts = run_dir / "artifacts"
    read = [
        *artifacts.glob("*.md"),
        artifacts / "run_full.log",
        artifacts / "run_full.jsonl",
        *artifacts.rglob("*.csv"),
    ]
    for path in read:
        assert words(path.read_text()) == [], path.name
    for figure in artifacts.rglob("figs/*.svg"):
        assert words(figure.read_text()) == []


def test_no_word_is_a_tag_a_picture_or_a_cell_of_the_files_in_markdown(run_dir: Path) -> None:
    """A pod would have a reader's viewer fetch a picture, or write a row of the table of criteria."""
    for path in (*run_dir.rglob("*.log"), *run_dir.rglob("run.info")):  # POISON itself is refused as binary
        path.write_text("fine\n")
    assert main(["bundle", RUN]) == 0
    main(["handoff", RUN])
    for path in (run_dir / "artifacts").glob("*.md"):
        text = re.sub(r"^````text$.*?^````$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)  # quoted
        assert "bold" in text
        assert [line for line in text.splitlines() if MARKDOWN.search(line)] == []


@pytest.mark.slow
def test_a_run_that_goes_on_is_followed_without_it(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = sqlite3.connect(run_dir / "journal.sqlite", isolation_level=None)
    db.execute("DELETE FROM events WHERE kind = 'run_ended'")
    db.close()
    assert main(["status", RUN]) == 1  # the poisoned verdict names files that are not there
    watched = headless.follow(run_dir, None, [])
    headless.report(watched, run_dir, as_json=False)
    headless.report(watched, run_dir, as_json=True)
    attach.stream(run_dir)
    printer = headless.Printer(headless.sys.stderr)
    printer.show(POISON, POISON, 0.0)
    printer.note(POISON)
    said = capsys.readouterr()
    assert words(said.out) == []
    assert words(said.err) == []


def test_what_is_in_the_snapshot_is_clean_already(run_dir: Path) -> None:
    journal = Journal(run_dir / "journal.sqlite", readonly=True)
    s = read_all(journal)
    journal.close()

    def walk(value: Any, way: str) -> None:
        if isinstance(value, str):
            assert words(value) == [], way
            assert "\n" not in value, way
        elif dataclasses.is_dataclass(value):
            for f in dataclasses.fields(value):
                if (way, f.name) != ("", "profile"):  # the operator's own file, kept as it was written
                    walk(getattr(value, f.name), f"{way}.{f.name}")
        elif hasattr(value, "items"):
            for k, v in value.items():
                walk(k, way)
                walk(v, f"{way}.{k}")
        elif isinstance(value, list | tuple):
            for v in value:
                walk(v, way)

    walk(s, "")
