"""Orders and consents at the relay count by a signature of a named domain over this run, and by nothing else.

Each try is made twice: against a worker, which obeys orders, and against the operator's console, which takes orders and
counts consents towards the full run and towards termination.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from relaykit import COORD, RUN, make_run

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold, reduce
from uvcc_console.core.journal.journal import read_all
from uvcc_console.core.paths import DOMAIN
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.halt import relay_path
from uvcc_console.runs import domain
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.peer_protocol import relay_words
from uvcc_engine.contract.peer_protocol.relay_words import FetchedRecord
from uvcc_engine.contract.run_files import control
from uvcc_engine.transcript.signed import approvals, boxes, orders
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.worker.relay_control import Orders

Sign = Callable[[bytes], str]
WORDS: list[dict[str, str]] = [
    {"type": "order", "mode": "hold", "nonce": "n", "deadline_s": "0.0"},
    {"type": "order", "mode": "halt", "nonce": "n", "deadline_s": "0.0"},
    {"type": "order", "mode": "release", "nonce": "n", "deadline_s": "0.0"},
    {"type": "consent", "what": "full"},
    {"type": "consent", "what": "terminate"},
]


def named(word: dict[str, str]) -> str:
    return word.get("mode") or f"consent-{word['what']}"


@dataclass
class Court:
    """A run with its order keys, one worker and the operator's console; ``taken``: what the console believed."""

    run_dir: Path
    worker: Orders
    obeyed: list[control.HaltRequest]
    console: relay_path.RelayHaltPath
    taken: list[ev.Event]
    snapshot: Snapshot
    pod: Identity
    given: list[FetchedRecord]

    def key(self, who: str) -> Path:
        return self.run_dir / "domains" / who.lower() if who.startswith("P") else self.run_dir

    def signed(self, word: dict[str, str], sign: Sign, run: str = RUN) -> str:
        return relay_path.under_seal(self.run_dir, orders.sealed(word | {"run": run}, sign))

    async def hear(self, body: str, name: str) -> tuple[list[str], list[str]]:
        """What the worker obeyed, and what the console took, of a record that lies at the relay."""
        self.obeyed.clear()
        self.taken.clear()
        self.worker.obey(body)
        self.given[:] = [FetchedRecord(name=name, body=body, party=0)]
        box = relay_path.RelayMailbox("", "g", RUN, ())
        box.after = 0  # not the first look
        await self.console.exchange_with(box, None, self.snapshot)
        said = [e.mode for e in self.taken if isinstance(e, ev.HaltRequested)]
        said += [f"consent-{e.what} by {e.by}" for e in self.taken if isinstance(e, ev.Consent)]
        return [o.mode for o in self.obeyed], said


@pytest.fixture
def court(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Court:
    pod = Identity.create(tmp_path / "identity")
    run_dir, journal = make_run("http://127.0.0.1:1", pod.public.ed25519)
    journal.append(ev.HaltRequested(nonce="of-before", mode="release", by="me"))
    s = read_all(journal)
    journal.close()
    keys, seal = domain.order_keys(run_dir), domain.order_seal(run_dir)
    at = tmp_path / "pod"
    at.mkdir()
    obeyed: list[control.HaltRequest] = []
    taken: list[ev.Event] = []
    given: list[FetchedRecord] = []
    link = LinkSpec(relay_url="http://127.0.0.1:1", token_file="x", halt_keys=list(keys.values()), halt_seal=seal)
    monkeypatch.setattr(relay_path.RelayMailbox, "exchange", lambda self, put, want: list(given))
    worker = Orders(link, RUN, COORD, at, sign=str, last=dict, told=obeyed.append)
    console = relay_path.RelayHaltPath(run_dir, taken.extend, lambda *_: None)
    return Court(run_dir, worker, obeyed, console, taken, s, pod, given)


@pytest.mark.parametrize("word", WORDS, ids=named)
@pytest.mark.parametrize("who", ["P0", "P1", "P2"])
async def test_the_word_of_a_named_domain_counts(court: Court, who: str, word: dict[str, str]) -> None:
    body = court.signed(word, relay_path.signer(court.key(who)))
    obeyed, taken = await court.hear(body, "order/x")
    if word["type"] == "order":
        assert (obeyed, taken) == ([word["mode"]], [word["mode"]])
    else:
        assert (obeyed, taken) == ([], [f"consent-{word['what']} by {who}"])
    court.worker.obey(body)
    assert len(court.obeyed) == len(obeyed)  # the same once more is nothing new
    assert (await court.hear(body, "order/x"))[1] == []


@pytest.mark.parametrize(
    ("echoed", "pid", "told"),
    [("x", 7, ["halt"]), ("x", 8, []), ("y", 7, []), ("", 7, [])],
    ids=["obeyed", "an earlier attempt's worker", "another order", "nobody obeyed"],
)
async def test_an_order_from_before_the_console_looked_counts_once_a_worker_of_this_attempt_obeyed_it(
    court: Court, echoed: str, pid: int, told: list[str]
) -> None:
    """A domain halted the run while this sidecar was being started anew: its journal never said who, or why."""
    started = ev.WorkerProcess(pod="p0r0", coord=COORD, state="started", pid=7)
    s = reduce(court.snapshot, started, court.snapshot.seq + 1)
    word = {"type": "order", "mode": "halt", "nonce": "x"}
    last = {"step": 5, "phase": "halted", "halt_nonce": echoed, "pid": pid}
    life = orders.sealed(relay_words.of_life(RUN, COORD, last, (), 1.0), partial(court.pod.sign, orders.BEAT_NAMESPACE))
    order = court.signed(word, relay_path.signer(court.key("P1")))
    court.given[:] = [
        FetchedRecord(name=orders.BEAT + COORD, body=life, party=0),
        FetchedRecord(name="order/x", body=order, party=1),  # said again after the worker had obeyed
    ]
    box = relay_path.RelayMailbox("", "g", RUN, ())
    for _ in range(2):  # told once
        await court.console.exchange_with(box, None, s)
    asked = [e for e in court.taken if isinstance(e, ev.HaltRequested)]
    assert [e.mode for e in asked] == told
    assert {(e.by, e.nonce) for e in asked} <= {("P1", "x")}


@pytest.mark.parametrize("phase", ["hold", "halted", "train"])
async def test_a_domains_own_console_tells_of_an_order_that_came_while_its_sidecar_was_down(
    court: Court, phase: str
) -> None:
    """It has nobody's word on which attempt a worker is of: it tells, once, and gives no order of its own."""
    (court.run_dir / DOMAIN).write_text("{}")
    said: list[ev.Event] = []
    last = {"step": 5, "phase": phase, "halt_nonce": "x", "pid": 7}
    life = orders.sealed(relay_words.of_life(RUN, COORD, last, (), 1.0), partial(court.pod.sign, orders.BEAT_NAMESPACE))
    order = court.signed({"type": "order", "mode": "halt", "nonce": "x"}, relay_path.signer(court.key("P1")))
    court.given[:] = [FetchedRecord(name=orders.BEAT + COORD, body=life), FetchedRecord(name="order/x", body=order)]
    s = court.snapshot
    for _ in range(2):  # a sidecar that is started, and another
        console, taken = relay_path.RelayHaltPath(court.run_dir, said.extend, lambda *_: None), len(said)
        box = relay_path.RelayMailbox("", "g", RUN, ())
        await console.exchange_with(box, None, s)
        s = fold(said[taken:], s)
    assert not [e for e in said if isinstance(e, ev.HaltRequested)]
    told = [e.text for e in said if isinstance(e, ev.Alert)]
    text = "P1 asked for a halt while nobody listened here; it was obeyed at step 5"
    assert told == ([text] if phase != "train" else [])
    asked = ev.HaltRequested(nonce="x", mode="halt", by="P1")
    known = relay_path.RelayHaltPath(court.run_dir, said.append, lambda *_: None)
    await known.exchange_with(relay_path.RelayMailbox("", "g", RUN, ()), None, fold([asked], court.snapshot))
    assert len([e for e in said if isinstance(e, ev.Alert)]) == len(told)  # its journal has that order


async def test_the_end_of_the_attempt_before_told_once_more_does_not_bring_its_order_back(court: Court) -> None:
    """Behind a resume an agent tells again how its last processes ended, before it tells of the new ones."""
    phase = ev.PhaseStarted(phase="full", engine_run=RUN, steps=60, sid_job="", attempt=1)
    process = partial(ev.WorkerProcess, pod="p0r0", coord=COORD, engine_run=RUN, pid=7)
    ended = [process(state="started"), process(state="exited", rc=0)]
    s = fold([*ended, phase, process(state="exited", rc=0)], court.snapshot)
    last = {"step": 5, "phase": "halted", "halt_nonce": "x", "pid": 7}
    life = orders.sealed(relay_words.of_life(RUN, COORD, last, (), 1.0), partial(court.pod.sign, orders.BEAT_NAMESPACE))
    order = court.signed({"type": "order", "mode": "halt", "nonce": "x"}, relay_path.signer(court.key("P1")))
    court.given[:] = [FetchedRecord(name="order/x", body=order), FetchedRecord(name=orders.BEAT + COORD, body=life)]
    await court.console.exchange_with(relay_path.RelayMailbox("", "g", RUN, ()), None, s)
    assert not [e for e in court.taken if isinstance(e, ev.HaltRequested)]


def _stranger(court: Court) -> Sign:
    key = Ed25519PrivateKey.generate()
    return lambda payload: sshsig.sign(key, key.public_key().public_bytes_raw(), orders.ORDER_NAMESPACE, payload)


FORGERIES: dict[str, Callable[[Court, dict[str, str]], str]] = {
    "a stranger's key": lambda c, w: c.signed(w, _stranger(c)),
    "nobody's signature": lambda c, w: c.signed(w, lambda payload: ""),
    "a pod's identity": lambda c, w: c.signed(w, lambda p: c.pod.sign(orders.ORDER_NAMESPACE, p)),
    "a domain's key, as an approval": lambda c, w: c.signed(
        w, relay_path.signer(c.key("P1"), namespace=approvals.APPROVAL_NAMESPACE)
    ),
    "a domain's word for another run": lambda c, w: c.signed(w, relay_path.signer(c.key("P1")), run="other.full"),
    "a domain's word, then changed": lambda c, w: relay_path.under_seal(
        c.run_dir,
        orders.sealed(w | {"run": RUN}, relay_path.signer(c.key("P1"))).replace('"run"', '"also":"x","run"'),
    ),
    "under another run's seal": lambda c, w: boxes.seal_with(
        orders.sealed(w | {"run": RUN}, relay_path.signer(c.key("P1"))), bytes(32)
    ),
    "two domains' names in one": lambda c, w: c.signed(
        w, lambda p: relay_path.signer(c.key("P1"))(p) + relay_path.signer(c.key("P2"))(p)[:9]
    ),
}


@pytest.mark.parametrize("how", FORGERIES)
@pytest.mark.parametrize("word", WORDS, ids=named)
async def test_whatever_else_lies_there_counts_for_nothing(court: Court, how: str, word: dict[str, str]) -> None:
    for name in ("order/x", "consent/x", "beat/x", "x"):
        assert await court.hear(FORGERIES[how](court, word), name) == ([], [])


async def test_the_operator_counts_as_no_domain(court: Court) -> None:
    for what in ("full", "terminate"):
        body = court.signed({"type": "consent", "what": what}, relay_path.signer(court.run_dir))
        assert await court.hear(body, "consent/x") == ([], [])


async def test_one_domain_that_signs_often_is_one(court: Court) -> None:
    events: list[ev.Event] = []
    for who in ("P1", "P1", "P2"):
        sign = relay_path.signer(court.key(who))
        await court.hear(court.signed({"type": "consent", "what": "full"}, sign), "consent/x")
        events += court.taken
    profile: dict[str, Any] = {"consent": {"full": 3, "terminate": 1}}
    s = fold(events, replace(court.snapshot, profile=profile))
    assert domain.missing(s, "full") == "full needs the signatures of 3 of 3 domains; signed by P1, P2"
    assert domain.missing(s, "terminate").endswith("signed by nobody")  # what is signed is one thing


async def test_who_is_named_is_what_the_run_wrote_down(court: Court) -> None:
    file = court.run_dir / relay_path.FOLDER / relay_path.SIGNERS
    listed = json.loads(file.read_text())
    body = court.signed({"type": "consent", "what": "full"}, relay_path.signer(court.key("P1")))
    for damaged in (json.dumps({k: v for k, v in listed.items() if k != "P1"}), "[]", "{", ""):
        file.write_text(damaged)
        assert (await court.hear(body, "consent/x"))[1] == []
    file.write_text(json.dumps(listed))
    assert (await court.hear(body, "consent/x"))[1] == ["consent-full by P1"]
