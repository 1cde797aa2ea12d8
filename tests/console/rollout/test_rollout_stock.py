"""A rollout waits for stock: bounded, told, interruptible, within the price ceiling, and with nothing rented."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.cli.follow.headless import ProgressLine
from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.core.snapshot import StageView
from uvcc_console.fleet.cloud.choice import OfferFilter
from uvcc_console.fleet.cloud.own_machines import PlainOffer, choose
from uvcc_console.fleet.provider import NoOffer, Pod, PodRequest, Quote, QuoteLine
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import parse
from uvcc_console.report.run_log import Translator
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import provision, stock
from uvcc_engine.contract.errors import UnreachableError, UvccError

JOB = {"kind": "private", "model": "mlp-digits", "steps": 2}


class Market:
    """Answers one quote after another; it can do nothing else, so that whoever waits can rent nothing."""

    name = "market"

    def __init__(self, *answers: UvccError | None) -> None:
        self.answers = list(answers)

    async def quote(self, requests: Sequence[PodRequest]) -> Quote:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise answer
        return Quote(tuple(QuoteLine(r, "market", "x", 1.0) for r in requests), 1.0)


class Hours:
    """The run's clock; a sleep moves it."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def now(self, run_dir: Path) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[Rollout]:
    (tmp_path / "r").mkdir()
    checked = parse({"job": JOB, "fleet": {"wait_for_stock": 2.0}, "limits": {"hourly": 9, "total": 9}})
    plan = make_plan("r", "r", checked)
    journal = Journal(tmp_path / "r" / "journal.sqlite", source="test")
    members = {n: Member(n, request) for n, request in plan.requests.items()}
    unknown: Any = Market(None)
    made = Rollout(plan, tmp_path / "r", Bus(journal), unknown, tmp_path, members)
    yield made
    journal.close()


def _told(ctx: Rollout) -> list[tuple[str, str]]:
    ctx.bus.commit()
    events = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite")]
    return [(e.status, e.detail) for e in events if isinstance(e, ev.StageChanged)]


async def test_stock_that_comes_is_taken_and_the_wait_is_told(ctx: Rollout) -> None:
    hours, none = Hours(), NoOffer("no offer fits: at most 2.00 $/h removed the last 4 offers")
    ctx.provider = Market(none, none, UnreachableError("the API is down"), None)  # type: ignore[assignment]
    found = await stock.wait(ctx, hours.now, hours.sleep)
    assert (len(found.lines), hours.at) == (3, 1_000_000.0 + 3 * stock.LOOK_S)
    told = _told(ctx)
    assert [status for status, _ in told] == ["running"] * 4
    assert "until 1970-01-12 15:46 UTC, nothing is rented: no offer fits: at most 2.00 $/h" in told[0][1]
    assert "the API is down" in told[2][1]
    assert told[3][1] == ""


async def test_the_wait_ends_with_its_hours(ctx: Rollout) -> None:
    hours = Hours()
    ctx.provider = Market(NoOffer("in stock removed the last 2 offers"))  # type: ignore[assignment]
    with pytest.raises(NoOffer, match="no stock in 2 h: in stock removed the last 2"):
        await stock.wait(ctx, hours.now, hours.sleep)
    assert hours.at == 1_000_000.0 + 7200.0


async def test_what_does_not_pass_is_not_waited_for(ctx: Rollout) -> None:
    hours = Hours()
    for error in (NoOffer("gpu H1OO removed the last 9 offers", passing=False), UnreachableError("down")):
        ctx.provider = Market(error)  # type: ignore[assignment]
        with pytest.raises(type(error), match=error.what):
            await stock.wait(ctx, hours.now, hours.sleep)
    assert (hours.at, _told(ctx)) == (1_000_000.0, [])


async def test_without_the_key_nothing_is_waited_for(ctx: Rollout) -> None:
    ctx.plan = replace(ctx.plan, profile=parse({"job": JOB}))
    ctx.provider = Market(NoOffer("in stock removed the last 2 offers"))  # type: ignore[assignment]
    with pytest.raises(NoOffer, match=r"^in stock removed"):
        await provision.quote(ctx)


async def test_a_wait_can_be_ended_at_any_time(ctx: Rollout) -> None:
    ctx.provider = Market(NoOffer("in stock removed the last 2 offers"))  # type: ignore[assignment]
    waiting = asyncio.create_task(provision.quote(ctx))
    while not _told(ctx):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    ("offers", "wanted", "passing"),
    [
        ([PlainOffer("a", "v", "x", "H100", 1, 2.0, stock=False)], OfferFilter(gpu="H100"), True),
        ([PlainOffer("a", "v", "x", "H100", 1, 2.0)], OfferFilter(gpu="H100", max_price=1.0), True),
        ([PlainOffer("a", "v", "y", "H100", 1, 2.0)], OfferFilter(gpu="H100", regions=("x",)), True),
        ([PlainOffer("a", "v", "x", "A100", 1, 2.0)], OfferFilter(gpu="H100"), False),
        ([PlainOffer("a", "v", "x", "H100", 1, 2.0)], OfferFilter(gpu="H100", gpus=8), False),
        ([], OfferFilter(gpu="H100"), True),
    ],
)
def test_what_passes_by_itself(offers: list[PlainOffer], wanted: OfferFilter, passing: bool) -> None:
    with pytest.raises(NoOffer) as error:
        choose(offers, wanted, [0, 1, 2], "v", "image")
    assert error.value.passing is passing


class Slow(Market):
    """A provider whose pods stand in a queue; what it says of that changes from look to look."""

    word = ""

    async def wait_ready(self, pod: Pod) -> Pod:
        for word in ("", "PENDING Priority", "PENDING Priority", "PENDING Resources", "PENDING Priority", "\x1b[31mX"):
            self.word = word
            for _ in range(3):
                await asyncio.sleep(0)
        raise UvccError("enough")

    def waits(self, name: str) -> str:
        return self.word if name.endswith("-p0r0") else ""

    async def create(self, request: PodRequest) -> Pod:
        return Pod(request.name, 0, 0, "slow", "1")


async def test_why_a_pod_is_not_ready_is_told_each_reason_once(ctx: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx.provider = Slow(None)  # type: ignore[assignment]
    monkeypatch.setattr(provision, "TELL_S", 0.0)
    with pytest.raises(UvccError, match="enough"):
        await provision.one_pod(ctx, ctx.members["p0r0"])
    ctx.bus.commit()
    told = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite") if isinstance(e, ev.PodChanged)]
    assert [e.detail for e in told] == ["", "PENDING Priority", "PENDING Resources", "X"]
    assert {e.state for e in told} == {"booting"}
    shown = fold(told)
    line = ProgressLine().line(replace(shown, stages=(StageView("provision", "running"),)))
    assert line == "provision running  p0r0: X"
    logged = [e.name for e in Translator(ctx.run_dir).translate(told)]
    assert logged == ["pod_created", *["node_bootstrap_step"] * 3]  # it is created once
