"""No wait for others is silent: for whom, since when and for how long still is told, and told again."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import relay  # noqa: F401
from test_peers import WAIT_S, Table, met, table  # noqa: F401

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.federation import data_owner, seat
from uvcc_console.rollout.federated import told_waits as waits_module
from uvcc_console.rollout.federated.told_waits import AFTER_S, EACH_S, ToldWait, all_domains
from uvcc_console.runs import processes
from uvcc_engine.contract.errors import ConfigError, PeerLostError

NOON = datetime(2026, 11, 30, 12, 0, 5, tzinfo=UTC)


def test_a_wait_is_told_after_a_moment_when_it_changes_and_each_minute() -> None:
    told: list[str] = []
    waiting = ToldWait(told.append, "come", 100.0, 400.0, wall=lambda: NOON)
    for now in (100.0, 100.0 + AFTER_S - 0.1):
        waiting.look("P1, P2", now)
    assert told == []  # three domains are never there at the same moment
    waiting.look("P1, P2", 110.0)
    waiting.look("P1, P2", 110.0 + EACH_S - 0.1)
    waiting.look("P2", 171.0)
    waiting.look("", 300.0)
    waiting.look("P2", 171.0 + EACH_S)
    assert told == [
        "waits for P1, P2 since 12:00:05 UTC (not come yet), 290 s more at most",
        "waits for P2 since 12:00:05 UTC (not come yet), 229 s more at most",
        "waits for P2 since 12:00:05 UTC (not come yet), 169 s more at most",
    ]


def test_a_domain_that_is_looked_for_is_told_of_before_the_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(waits_module, "AGAIN_S", 0.0)
    monkeypatch.setattr(waits_module, "ToldWait", lambda *args: ToldWait(*args, after_s=0.0, wall=lambda: NOON))
    looks = [{0: "a"}, {0: "a", 2: "c"}, {2: "c", 1: "b", 0: "a"}]
    found = asyncio.run(all_domains(lambda: looks.pop(0), "published a roster", 600.0, told.append))
    assert list(found.items()) == [(0, "a"), (1, "b"), (2, "c")]
    assert [one.partition(" since ")[0] for one in told] == [
        "waits for P1's domain, P2's domain",
        "waits for P1's domain",
    ]
    assert "(not published a roster yet), " in told[0]


def test_a_meeting_says_who_has_not_come(table: Table) -> None:  # noqa: F811
    async def story() -> None:
        async with table.peers(0) as (peers,):
            table.buses[0].record([ev.StageChanged(name="meet", status="running", detail="")])
            meeting = asyncio.ensure_future(met([peers]))
            await table.buses[0].wait(lambda s: s.stage is not None and "waits for P1, P2 since" in s.stage.detail, 120)
            stage = table.buses[0].snapshot.stage
            assert stage is not None
            detail = stage.detail
            assert "(not come yet)" in detail
            left = float(detail.rpartition(", ")[2].partition(" ")[0])
            assert 0 < left <= WAIT_S - AFTER_S
            with pytest.raises(PeerLostError):
                await table.in_vain(meeting, lambda: True)

    asyncio.run(story())


def test_an_owner_that_waits_hears_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = ["P1's domain has not approved"] * 2 + ["no signed roster of P1"] * 62

    def ready(*_: object) -> str:
        if answers:
            raise data_owner.NotYetError(answers.pop(0))
        return "request"

    monkeypatch.setattr(data_owner, "ready", ready)
    told: list[str] = []
    request = data_owner.waited(None, "id", None, (), -1, 240.0, told.append, lambda _: None)  # type: ignore[arg-type]
    assert request == "request"
    assert [one.split(", ", 1)[1] for one in told] == [
        "240 s more at most: P1's domain has not approved",
        "238 s more at most: no signed roster of P1",
        "178 s more at most: no signed roster of P1",
    ]
    assert all(one.startswith("waits since ") and " UTC, " in one for one in told)


@pytest.mark.parametrize(("ended", "words"), [(True, "has ended at 20"), (False, "nobody conducts")])
def test_nothing_is_signed_for_a_part_that_has_ended_and_it_says_so(
    ended: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path))
    run_dir = paths.ensure(paths.runs_dir() / "ward-1")
    (run_dir / seat.FILE).write_text(json.dumps({"relay": "http://127.0.0.1:1"}))
    journal = Journal(run_dir / processes.JOURNAL, source="test")
    created = ev.RunCreated(
        run="ward-1", profile_name="ward", job_kind="private", replicas=1, pipeline_stages=1, tensor=1, stages=["meet"]
    )
    journal.append(created)
    if ended:
        journal.append(ev.RunEnded(status="failed", detail="P2 had not come after 240 s"))
    journal.close()
    assert main(["domain", "consent", "ward-1", "resume"]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert words in said
    assert ("failed: P2 had not come after 240 s" in said) == ended
    assert "begin" in said  # the next attempt
