"""``uvcc pods --sweep`` deletes what dead runs of this data folder left, and nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet import provider_kinds as providers
from uvcc_console.fleet.cloud.intents import Intents
from uvcc_console.fleet.provider import Books, Caps, Pod
from uvcc_console.runs.processes import CONDUCTOR, write_record
from uvcc_engine.contract.errors import UnreachableError


class Shop:
    """A provider with pods; ``stubborn`` ones refuse to go."""

    def __init__(self, *names: str) -> None:
        self.pods = {n: Pod(n, 0, 0, "local", n) for n in names}
        self.stubborn: set[str] = set()
        self.caps: Caps | None = None
        self.unproven: list[str] = []

    async def list(self, prefix: str) -> list[Pod]:
        return [p for n, p in self.pods.items() if n.startswith(prefix)]

    async def delete(self, pod: Pod) -> None:
        if pod.name in self.stubborn:
            raise UnreachableError(f"pod {pod.name} is not gone")
        del self.pods[pod.name]

    def books(self) -> Books:
        return Books()

    async def prove(self, *, ended: bool, keep: object = ()) -> list[str]:
        return self.unproven

    async def close(self) -> None:
        pass


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    found = Shop("uvcc-dead-1-p0r0", "uvcc-live-1-p0r0", "uvcc-elsewhere-1-p0r0", "somebody-else")
    monkeypatch.setattr(providers, "provider_for", lambda *a, **k: found)
    for run in ("dead-1", "live-1"):
        folder = Path(os.environ["UVCC_HOME"]) / "runs" / run
        folder.mkdir(parents=True)
        journal = Journal(folder / "journal.sqlite", source="test")
        journal.append(
            ev.RunCreated(run=run, profile_name="d", job_kind="", replicas=1, pipeline_stages=1, tensor=1, stages=[])
        )
        journal.close()
    write_record(Path(os.environ["UVCC_HOME"]) / "runs" / "live-1", CONDUCTOR)  # this very process
    dead = Path(os.environ["UVCC_HOME"]) / "runs" / "dead-1"
    (dead / f"{CONDUCTOR}.json").write_text(json.dumps({"pid": os.getpid(), "starttime": 1}))  # a reused pid
    return found


def test_each_pod_is_told_apart(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pods", "--json"]) == 0
    rows = {r["name"]: r["fate"] for r in json.loads(capsys.readouterr().out)}
    assert rows == {"uvcc-dead-1-p0r0": "ORPHAN", "uvcc-live-1-p0r0": "live", "uvcc-elsewhere-1-p0r0": "foreign"}
    assert len(shop.pods) == 4


def test_a_sweep_touches_neither_live_nor_foreign_pods(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pods", "--sweep", "--json"]) == 0
    assert [r["name"] for r in json.loads(capsys.readouterr().out) if r["swept"]] == ["uvcc-dead-1-p0r0"]
    assert set(shop.pods) == {"uvcc-live-1-p0r0", "uvcc-elsewhere-1-p0r0", "somebody-else"}


def test_a_pod_that_will_not_go_is_no_success(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    shop.stubborn.add("uvcc-dead-1-p0r0")
    assert main(["pods", "--sweep"]) == 1
    assert "uvcc-dead-1-p0r0 is not gone" in capsys.readouterr().err


def test_who_does_not_answer_is_unknown_and_no_leak(
    shop: Shop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Pod("uvcc-dead-1-p1r0", 1, 0, "local", "h", doubt="its host is off")
    shop.pods[there.name] = there
    shop.stubborn.add(there.name)
    assert main(["pods"]) == 3
    assert "may be there, nobody can tell: its host is off" in capsys.readouterr().err
    assert main(["pods", "--sweep"]) == 3  # what can be ended is ended, and the rest named
    said = capsys.readouterr()
    assert "then: uvcc pods --end uvcc-dead-1-p1r0" in said.err
    assert set(shop.pods) == {there.name, "uvcc-live-1-p0r0", "uvcc-elsewhere-1-p0r0", "somebody-else"}

    async def refused(prefix: str) -> list[Pod]:
        raise UnreachableError("401: the key is not taken any more")

    monkeypatch.setattr(shop, "list", refused)
    assert main(["pods", "--sweep"]) == 3
    said = capsys.readouterr()
    assert "401" in said.err
    assert "no pods" not in said.err + said.out  # nobody said so


def without_a_key(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run at a market whose API key is missing, which therefore ended before it asked for anything."""
    monkeypatch.setenv("HOME", os.environ["UVCC_HOME"])
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.delenv("UVCC_PRIME_API_KEY", raising=False)
    folder = Path(os.environ["UVCC_HOME"]) / "runs" / "keyless-1"
    folder.mkdir(parents=True)
    journal = Journal(folder / "journal.sqlite", source="test")
    kinds = {"job_kind": "private", "replicas": 1, "pipeline_stages": 1, "tensor": 1, "stages": []}
    journal.append(ev.RunCreated(run=folder.name, profile_name="d", profile={"fleet": {"provider": "prime"}}, **kinds))
    journal.close()
    return folder


def test_an_account_that_no_run_asked_for_anything_fails_no_sweep(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that failed for its missing API key left nothing, and each sweep ended with 3 while its folder stayed."""
    without_a_key(monkeypatch)
    for argv in (["pods"], ["pods", "--sweep"]):
        assert main(argv) == 0
        said = capsys.readouterr()
        assert "prime was not looked at, and keyless-1 had asked it for nothing: no Prime Intellect API key" in said.err
        assert "uvcc runs --delete keyless-1 forgets it" in said.err
        assert "no pods" not in said.err
    assert main(["pods", "--provider", "prime"]) == 3  # whoever names it wants its word
    assert "uvcc: prime: no Prime Intellect API key (set PRIME_API_KEY" in capsys.readouterr().err


def test_an_account_that_a_run_asked_for_pods_is_unknown_without_its_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = without_a_key(monkeypatch)
    Intents.of(folder).note(time.time(), name="uvcc-keyless-1-p0r0", offer="o")
    assert main(["pods"]) == 3
    assert "uvcc: prime, which keyless-1 asked for pods: no Prime Intellect API key (set" in capsys.readouterr().err


def test_a_provider_that_there_is_not_is_wrong_usage(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pods", "--provider", "primr"]) == 2
    assert "prime" in capsys.readouterr().err


def test_a_leak_weighs_more_than_what_is_unknown(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    for n, doubt in ((1, "its host is off"), (2, "")):
        shop.pods[f"uvcc-dead-1-p{n}r0"] = Pod(f"uvcc-dead-1-p{n}r0", n, 0, "local", f"h{n}", doubt=doubt)
        shop.stubborn.add(f"uvcc-dead-1-p{n}r0")
    assert main(["pods", "--sweep"]) == 1


def test_one_pod_is_ended_by_name_unless_a_live_run_uses_it(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pods", "--end", "uvcc-live-1-p0r0"]) == 2
    assert "uvcc teardown live-1" in capsys.readouterr().err
    assert main(["pods", "--end", "uvcc-elsewhere-1-p0r0"]) == 2
    assert main(["pods", "--end", "uvcc-dead-1-p0r0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"pod": "uvcc-dead-1-p0r0", "gone": True}
    assert set(shop.pods) == {"uvcc-live-1-p0r0", "uvcc-elsewhere-1-p0r0", "somebody-else"}


def test_a_teardown_looks_again_for_what_its_run_could_not_prove(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ended on a full disk told of a leak; the provider has none, so nobody shall be sent after it."""
    name = "uvcc-dead-1-p0r0"
    journal = Journal(Path(os.environ["UVCC_HOME"]) / "runs" / "dead-1" / "journal.sqlite", source="test")
    at = {"party": 0, "replica": 0, "provider": "local"}
    journal.append(
        ev.PodChanged(pod="p0r0", state="lost", detail="not proven gone", **at),
        ev.RunEnded(status="failed", detail="the disk is full", leaks=[name]),
    )
    journal.close()
    shop.stubborn = {name}
    assert main(["teardown", "dead-1"]) == 1
    assert "is not gone" in capsys.readouterr().err
    shop.stubborn, shop.unproven = set(), [f"{name}xaaaaaa"]
    assert main(["teardown", "dead-1"]) == 1  # ended, but a create of that name was never answered
    shop.unproven = []
    assert main(["teardown", "dead-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gone"] is True
    assert name not in shop.pods


def kept_run() -> str:
    """A run that ended well and kept its two pods; the name of the first."""
    folder = Path(os.environ["UVCC_HOME"]) / "runs" / "kept-1"
    folder.mkdir(parents=True)
    kinds = {"job_kind": "lm", "replicas": 1, "pipeline_stages": 1, "tensor": 1, "stages": []}
    fleet = {"provider": "local", "keep_pods": True}
    journal = Journal(folder / "journal.sqlite", source="test")
    journal.append(
        ev.RunCreated(ts=time.time(), run="kept-1", profile_name="d", profile={"fleet": fleet}, **kinds),
        *(ev.PodChanged(pod=f"p{p}r0", party=p, replica=0, provider="local", state="agent") for p in (0, 1)),
        ev.RunEnded(status="ok", detail="", leaks=[]),
    )
    journal.close()
    (folder / f"{CONDUCTOR}.json").write_text(json.dumps({"pid": os.getpid(), "starttime": 1}))  # it has gone
    return "uvcc-kept-1-p0r0"


def test_a_teardown_ends_what_its_run_kept_and_says_gone_of_nothing_that_is_there(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said of kept pods, which may cost money, that they were proven gone."""
    first = kept_run()
    second = first.replace("p0", "p1")
    shop.pods |= {n: Pod(n, 0, 0, "local", n) for n in (first, second)}
    shop.stubborn = {second}
    assert main(["teardown", "kept-1"]) == 1
    said = capsys.readouterr()
    assert f"kept-1: NOT proven gone: {second}" in said.err
    assert (first in shop.pods, second in shop.pods) == (False, True)
    shop.stubborn = set()
    assert main(["teardown", "kept-1"]) == 0
    assert capsys.readouterr().out == "kept-1: 2 pods proven gone (ok)\n"
    assert second not in shop.pods


def test_a_teardown_leaves_kept_pods_to_a_live_run_that_took_them_over(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    first = kept_run()
    shop.pods[first] = Pod(first, 0, 0, "local", first)
    journal = Journal(Path(os.environ["UVCC_HOME"]) / "runs" / "live-1" / "journal.sqlite", source="test")
    kinds = {"job_kind": "lm", "replicas": 1, "pipeline_stages": 1, "tensor": 1, "stages": []}
    fleet = {"provider": "local", "attach_prefix": "uvcc-kept-1-"}
    journal.append(ev.RunCreated(run="live-1", profile_name="d", profile={"fleet": fleet}, **kinds))
    journal.close()
    assert main(["teardown", "kept-1"]) == 1
    assert f"{first} is in use by a live run" in capsys.readouterr().err
    assert first in shop.pods


def test_a_create_without_an_answer_is_unknown_until_it_is_proven_nothing(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten minutes is the market's lag: a sweep within them can prove nothing, and leaves nothing behind either."""
    shop.caps, shop.unproven = None, ["uvcc-dead-1-p0r0xaaaaaa"]
    folder = Path(os.environ["UVCC_HOME"]) / "runs" / "dead-1"
    Intents.of(folder).note(time.time(), name=shop.unproven[0], offer="x", price_hr=1.0)
    begun = time.time()
    assert main(["pods", "--sweep"]) == 3
    ended = time.time()
    said = capsys.readouterr().err
    assert "not proven yet" in said
    clocks = {time.strftime("%H:%M", time.localtime(at + 600.0)) for at in (begun, ended)}  # a minute may end between
    assert any(f"look again at {clock}: uvcc pods --sweep" in said for clock in clocks)
    shop.unproven = []
    assert main(["pods", "--sweep"]) == 0


@pytest.mark.parametrize(
    "content", [b"", b"no database" * 100, b"SQLite format 3\x00" + b"\xff" * 5000], ids=["empty", "other", "damaged"]
)
def test_one_broken_run_stops_no_other_runs_verbs(
    shop: Shop, content: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UVCC_STRICT", "")
    runs = Path(os.environ["UVCC_HOME"]) / "runs"
    for name in ("aa-broken", "zz-broken"):
        (runs / name).mkdir()
        (runs / name / "journal.sqlite").write_bytes(content)
        (runs / name / "conductor.json").write_text("[1, 2]")
    shop.pods["uvcc-aa-broken-p0r0"] = Pod("uvcc-aa-broken-p0r0", 0, 0, "local", "id")
    assert main(["pods", "--sweep", "--json"]) == 1
    said = capsys.readouterr()
    rows = {r["name"]: (r["fate"], r["swept"]) for r in json.loads(said.out)}
    assert rows["uvcc-dead-1-p0r0"] == ("ORPHAN", True)
    assert rows["uvcc-aa-broken-p0r0"] == ("unreadable", False)
    assert "uvcc-aa-broken-p0r0" in shop.pods
    assert "aa-broken is unreadable" in said.err
    assert "Traceback" not in said.err
    assert main(["runs", "--json"]) == 0
    listed = {r["run"]: r["status"] for r in json.loads(capsys.readouterr().out)}
    assert (listed["dead-1"], listed["live-1"]) == ("running", "running")
    assert (listed["aa-broken"], listed["zz-broken"]) == ("unreadable", "unreadable")
    for argv, code in ((["status", "dead-1"], 0), (["halt", "dead-1"], 2), (["paths"], 0), (["resume", "live-1"], 2)):
        assert main(argv) == code
        assert "Traceback" not in capsys.readouterr().err
    for verb in ("status", "halt", "resume", "teardown"):
        assert main([verb, "aa-broken"]) == 2
        assert "aa-broken" in capsys.readouterr().err
