"""The halter between ladder and channels: what goes out under which nonce, and whose word counts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.halt.machine import Times
from uvcc_console.haltd.halter import Halter
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.agent_protocol.agent_commands import Command, to_json
from uvcc_engine.contract.agent_protocol.agent_messages import Ack, HaltStage, Telemetry, parse
from uvcc_engine.contract.errors import UnreachableError

PODS = {"p0r0": 1, "p1r0": 1}
FAST = Times(commit=3.0, halt=10.0, term=5.0, kill=5.0, terminate=20.0)


@dataclass
class ChannelFake:
    """Takes every command; ``refusal`` answers instead of an acknowledgement."""

    up: bool = True
    refusal: str = ""
    code: str = "failed"
    silent: bool = False
    sent: list[dict[str, Any]] = field(default_factory=list)

    def post(self, command: Command, *, nonce: str) -> asyncio.Future[Ack] | None:
        if not self.up:
            return None
        self.sent.append({**to_json(command), "nonce": nonce})
        answer: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        if not self.silent:
            code = wire.AckCode(self.code)
            answer.set_result(Ack(nonce=nonce, ok=not self.refusal, code=code, error=self.refusal))
        return answer


class Scene:
    """A halter with fake channels, a clock that is set, and all that was journalled."""

    def __init__(self, *, auto: tuple[str, ...] = ("hold", "halt", "term"), terminate: Any = None) -> None:
        self.now = 0.0
        self.channels = {pod: ChannelFake() for pod in PODS}
        self.events: list[ev.Event] = []
        self.order: list[str] = []
        self.halter = Halter(
            self.channels, self._append, auto=auto, times=FAST, terminate=terminate, clock=lambda: self.now
        )

    def _append(self, events: list[ev.Event]) -> None:
        self.order += [f"sent {len(c.sent)}" for c in self.channels.values()] + ["journal"]
        self.events += events

    async def ask(self, mode: str, nonce: str = "n", **more: Any) -> None:
        self.halter.request(ev.HaltRequested(nonce=nonce, mode=mode, by="t", **more), "r.full", PODS)
        await settle()

    async def at(self, now: float) -> None:
        self.now = now
        self.halter.tick()
        await settle()

    def say(self, pod: str, stage: str, nonce: str = "n", **more: Any) -> None:
        told = {"run": "r.full", "nonce": nonce, "stage": stage, "coord": f"{pod}s0t0", **more}
        self.halter.message(pod, parse(json.dumps({"op": wire.HALTED, **told})))

    def dones(self) -> list[ev.HaltDone]:
        return [e for e in self.events if isinstance(e, ev.HaltDone)]


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_network_comes_before_the_disk() -> None:
    scene = Scene()
    await scene.ask("hold")
    assert scene.order[:3] == ["sent 1", "sent 1", "journal"]
    sent = scene.channels["p0r0"].sent[0]
    assert sent == {"op": wire.HALT, "nonce": "n", "run": "r.full", "mode": "hold", "deadline_s": 5.0}


async def test_signals_have_nonces_of_their_own_and_name_the_run() -> None:
    scene = Scene(auto=("hold", "halt", "term", "kill"))
    await scene.ask("halt")
    scene.say("p0r0", "gone", step=4, checkpoint="ab")
    await scene.at(10.0)
    await scene.at(15.0)
    signals = [m for m in scene.channels["p1r0"].sent if m["op"] == wire.SIGNAL]
    assert [(m["signal"], m["nonce"], m["run"]) for m in signals] == [
        ("TERM", "n.term", "r.full"),
        ("KILL", "n.kill", "r.full"),
    ]
    assert all(m["op"] == wire.HALT for m in scene.channels["p0r0"].sent)


async def test_the_last_rung_ends_the_pod_at_its_provider() -> None:
    ended: list[str] = []

    async def terminate(pod: str) -> None:
        ended.append(pod)

    scene = Scene(auto=("hold", "halt", "term", "kill", "terminate"), terminate=terminate)
    await scene.ask("halt")
    scene.say("p0r0", "gone", step=4, checkpoint="ab")
    for now in (10.0, 15.0, 20.0):
        await scene.at(now)
    assert ended == ["p1r0"]
    (done,) = scene.dones()
    assert (done.verified, done.total) == (1, 2)  # gone, but without its checkpoint
    gone = [e for e in scene.events if isinstance(e, ev.HaltAck) and e.pod == "p1r0"][-1]
    assert (gone.stage, gone.path) == ("gone", "api")


async def test_a_provider_that_does_not_answer_leaves_the_pod_unknown() -> None:
    async def terminate(pod: str) -> None:
        raise UnreachableError("the API is down")

    scene = Scene(auto=("hold", "halt", "term", "kill", "terminate"), terminate=terminate)
    await scene.ask("halt")
    for now in (10.0, 15.0, 20.0, 40.0):
        await scene.at(now)
    assert scene.dones()[-1].verified == 0
    assert [e for e in scene.events if isinstance(e, ev.HaltAck)][-1].stage == "unknown"


async def test_a_termination_under_way_is_not_begun_again_and_ends_with_the_halter() -> None:
    begun: list[str] = []
    ended: list[str] = []

    async def terminate(pod: str) -> None:
        begun.append(pod)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(pod)
            raise

    scene = Scene(auto=("hold", "halt", "term", "kill", "terminate"), terminate=terminate)
    await scene.ask("halt")
    scene.say("p0r0", "gone", step=4, checkpoint="ab")
    for now in (10.0, 15.0, 20.0, 21.0, 22.0, 39.0):
        await scene.at(now)
    assert begun == ["p1r0"]
    told = len(scene.events)
    await scene.halter.close()
    assert ended == ["p1r0"]
    assert len(scene.events) == told


async def test_words_about_another_run_or_nonce_do_not_count() -> None:
    scene = Scene()
    await scene.ask("halt")
    scene.say("p0r0", "gone", nonce="older", step=4, checkpoint="ab")
    scene.halter.message("p0r0", HaltStage(run="r.smoke", nonce="n", stage="gone"))
    scene.halter.message("p0r0", Telemetry())
    scene.say("p0r0", "nonsense", step=None)
    assert scene.dones() == []
    assert {e.stage for e in scene.events if isinstance(e, ev.HaltAck)} == {"sent", "seen"}


@pytest.mark.parametrize("drill", [True, False])
async def test_a_new_nonce_takes_over_without_weakening_and_both_hear_the_verdict(drill: bool) -> None:
    scene = Scene()
    await scene.ask("halt", "one")
    await scene.ask("hold", "two", drill=drill)
    told = [(e.nonce, e.mode, e.drill) for e in scene.events if isinstance(e, ev.HaltRequested)]
    assert told == [("two", "halt", False)]
    assert [m["mode"] for m in scene.channels["p0r0"].sent] == ["halt", "halt"]
    scene.say("p0r0", "gone", nonce="one", step=4, checkpoint="ab")  # it obeyed the first one
    scene.say("p1r0", "gone", nonce="two", step=4, checkpoint="ab")
    assert {(d.nonce, d.mode, d.verified, d.drill) for d in scene.dones()} == {
        ("one", "halt", 2, False),
        ("two", "halt", 2, False),
    }


async def test_a_real_hold_replaces_a_drill() -> None:
    scene = Scene()
    await scene.ask("hold", "drill", drill=True)
    await scene.ask("hold", "real")
    await scene.at(3.0)
    assert [m["mode"] for m in scene.channels["p0r0"].sent] == ["hold", "hold", "halt"]
    assert scene.channels["p0r0"].sent[-1]["nonce"] == "real"


@pytest.mark.parametrize("drill", [True, False])
async def test_what_joins_an_open_hold_neither_releases_it_nor_keeps_its_owner_waiting(drill: bool) -> None:
    """A drill took an operator's hold over and released it: the halt that he had asked for never came."""
    scene = Scene()
    await scene.ask("hold", "one")
    await scene.ask("hold", "two", drill=drill)
    for pod in PODS:
        scene.say(pod, "held", nonce="two", step=4)
    await scene.at(3.0)
    assert [m["mode"] for m in scene.channels["p0r0"].sent] == ["hold", "hold", "halt"]
    for pod in PODS:
        scene.say(pod, "gone", nonce="two", step=4, checkpoint="ab")
    assert {(d.nonce, d.mode, d.verified, d.drill) for d in scene.dones()} == {
        ("one", "halt", 2, False),
        ("two", "halt", 2, False),
    }
    told = [(e.mode, e.drill) for e in scene.events if isinstance(e, ev.HaltRequested) and e.nonce == "two"]
    assert told == ([("hold", False)] if drill else []) + [("halt", False)]


async def test_whoever_held_first_may_still_release_what_another_held_as_well() -> None:
    """His release found no hold of its nonce, and was a release of nothing: the pods stayed held."""
    scene = Scene()
    await scene.ask("hold", "one")
    await scene.ask("hold", "two")
    await scene.ask("release", "one")
    assert [m["mode"] for m in scene.channels["p0r0"].sent] == ["hold", "hold", "release"]
    for pod in PODS:
        scene.say(pod, "released", nonce="two", step=4)
    assert {(d.nonce, d.mode, d.verified) for d in scene.dones()} == {("one", "release", 2), ("two", "release", 2)}


async def test_after_a_resume_nothing_of_the_old_halt_is_sent_again() -> None:
    scene = Scene()
    scene.channels["p1r0"].silent = True
    await scene.ask("halt")
    await scene.at(1.0)
    assert len(scene.channels["p1r0"].sent) > 1  # unacknowledged, so it was repeated
    scene.say("p0r0", "gone", step=4, checkpoint="ab")
    await scene.at(10.0)
    await scene.at(15.0)
    assert [(d.verified, d.total) for d in scene.dones()] == [(1, 2)]
    before = len(scene.channels["p1r0"].sent)
    scene.halter.renew("r.full", PODS)
    await scene.at(100.0)
    assert len(scene.channels["p1r0"].sent) == before


@pytest.mark.parametrize("drill", [False, True])
async def test_a_halt_without_a_verdict_holds_for_the_workers_that_are_started_under_it(drill: bool) -> None:
    """It was forgotten: the run went on, and whoever had asked waited two minutes for nothing."""
    scene = Scene()
    await scene.ask("hold", drill=drill)
    scene.halter.renew("r.full", PODS)
    for pod in PODS:
        scene.say(pod, "held", step=9)
    assert [(e.mode, e.drill) for e in scene.events if isinstance(e, ev.HaltRequested)] == [("hold", drill)]
    await scene.at(3.0)
    stage = "released" if drill else "gone"
    for pod in PODS:
        scene.say(pod, stage, step=9, checkpoint="" if drill else "ab")
    assert [m["mode"] for m in scene.channels["p0r0"].sent][-1] == ("release" if drill else "halt")
    assert [(d.nonce, d.drill, d.verified) for d in scene.dones()] == [("n", drill, 2)]


async def test_of_two_drills_both_hear_the_verdict() -> None:
    """The first waited for two minutes, and then said that its ladder went on."""
    scene = Scene()
    await scene.ask("hold", "one", drill=True)
    await scene.ask("hold", "two", drill=True)
    for stage in ("held", "released"):
        for pod in PODS:
            scene.say(pod, stage, nonce="two", step=4)
    assert {(d.nonce, d.verified, d.drill) for d in scene.dones()} == {("one", 2, True), ("two", 2, True)}


async def test_whoever_drills_hears_of_the_halt_that_came_in_between() -> None:
    scene = Scene()
    await scene.ask("hold", "drill", drill=True)
    await scene.ask("halt", "real")
    for pod in PODS:
        scene.say(pod, "gone", nonce="real", step=4, checkpoint="ab")
    assert {(d.nonce, d.mode, d.drill) for d in scene.dones()} == {("drill", "halt", False), ("real", "halt", False)}


async def test_whoever_released_hears_of_the_drill_that_came_in_between_as_a_release() -> None:
    scene = Scene()
    await scene.ask("hold", "held")
    await scene.ask("release", "held")
    await scene.ask("hold", "drill", drill=True)
    for stage in ("held", "released"):
        for pod in PODS:
            scene.say(pod, stage, nonce="drill", step=4)
    told = {(d.nonce, d.mode, d.drill, d.verified) for d in scene.dones()}
    assert told == {("held", "release", False, 2), ("drill", "hold", True, 2)}


async def test_a_refusal_is_told_and_no_worker_means_nothing_to_halt() -> None:
    scene = Scene()
    scene.channels["p0r0"].refusal = "no worker of run r.full was started on this pod"
    scene.channels["p0r0"].code = "no_worker"
    scene.channels["p1r0"].refusal = "no worker of run r.full has a disk"  # the code decides, not the words
    await scene.ask("halt")
    acks = {e.pod: (e.stage, e.detail) for e in scene.events if isinstance(e, ev.HaltAck)}
    assert acks == {
        "p0r0": ("gone", "nothing was started here"),
        "p1r0": ("unknown", "no worker of run r.full has a disk"),
    }


async def test_a_link_that_goes_while_a_halt_climbs_makes_its_pod_unknown_and_is_asked_again_when_it_is_back() -> None:
    scene = Scene()
    scene.channels["p1r0"].silent = True
    await scene.ask("halt")
    scene.channels["p1r0"].sent.clear()
    scene.halter.link("p1r0", False)
    unknown = [e for e in scene.events if isinstance(e, ev.HaltAck) and e.stage == "unknown"]
    assert [(e.pod, e.detail) for e in unknown] == [("p1r0", "its link is down")]
    assert scene.channels["p1r0"].sent == []
    scene.halter.link("p1r0", True)
    assert [m["mode"] for m in scene.channels["p1r0"].sent] == ["halt"]


async def test_a_termination_of_an_earlier_halt_is_no_evidence_for_the_next() -> None:
    """Its pod may be another machine by then."""
    let = asyncio.Event()

    async def terminate(pod: str) -> None:
        await let.wait()

    scene = Scene(auto=("hold", "halt", "term", "kill", "terminate"), terminate=terminate)
    await scene.ask("halt")
    scene.say("p0r0", "gone", step=4, checkpoint="ab")
    for now in (10.0, 15.0, 20.0):
        await scene.at(now)
    scene.halter.renew("r.full", PODS)
    await scene.ask("hold", "later")
    let.set()
    await settle()
    assert not [e for e in scene.events if isinstance(e, ev.HaltAck) and e.path == "api" and e.nonce == "later"]
