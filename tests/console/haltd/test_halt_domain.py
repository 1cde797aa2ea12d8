"""One domain's console: with its own credentials only it sees the others, halts everybody, and signs its consent."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from relaykit import COORD, QUICK, RUN, TOKENS, make_run, relay  # noqa: F401

from uvcc_console.core import events as ev
from uvcc_console.core.journal import Journal, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.core.state import fold
from uvcc_console.fleet.keys import KEY_FILE
from uvcc_console.haltd import relay as over_relay
from uvcc_console.haltd.service import Service
from uvcc_console.rollout import domain, spawn
from uvcc_engine.contract.control import read_halt
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.private.orders import Orders
from uvcc_engine.transcript.identity import Identity
from uvcc_engine.transcript.orders import BEAT_NAMESPACE


async def _until(path: Path, wanted: Any) -> Snapshot:
    journal = Journal(path / spawn.JOURNAL, readonly=True)
    try:
        async with asyncio.timeout(40):
            while not wanted(s := read_all(journal)):
                await asyncio.sleep(0.02)
        return s
    finally:
        journal.close()


async def test_a_domain_halts_all_with_its_own_key_and_the_operator_sees_who(relay: str, tmp_path: Path) -> None:  # noqa: F811
    identity = Identity.create(tmp_path / "identity")
    run_dir, journal = make_run(relay, identity.public.ed25519)
    keys = domain.order_keys(run_dir)
    exported = json.loads(json.dumps(domain.export(run_dir, read_all(journal), 1)))
    secrets = [*(t for p, t in enumerate(TOKENS) if p != 1), (run_dir / KEY_FILE).read_text(), "127.0.0.1:1"]
    assert not [s for s in secrets if s in json.dumps(exported)]  # nobody else's token, no operator key, no address
    theirs = domain.join(exported)
    pod = tmp_path / "pod"
    pod.mkdir()
    (pod / "token").write_text(TOKENS[0])
    link = {"relay_url": relay, "token_file": str(pod / "token"), "halt_keys": list(keys.values())}

    def beat() -> dict[str, Any]:
        asked = read_halt(pod, RUN)
        if asked is None:
            return {"step": 4, "phase": "train", "loss": 0.5}
        phase = "hold" if asked.mode == "hold" else "halted"
        return {"step": 5, "phase": phase, "halt_nonce": asked.nonce, "checkpoint": "c0ffee"}

    services = [asyncio.create_task(Service(folder, times=QUICK).run()) for folder in (run_dir, theirs)]
    try:
        with Orders(link, RUN, COORD, pod, sign=partial(identity.sign, BEAT_NAMESPACE), last=beat, told=lambda a: None):
            seen = await _until(theirs, lambda s: COORD in s.workers)
            assert (seen.workers[COORD].step, seen.workers[COORD].beat["loss"]) == (4, 0.5)
            desk = Journal(theirs / spawn.JOURNAL, source="tui")
            desk.append(ev.HaltRequested(nonce="from-p1", mode="halt", by="me"))
            desk.close()
            ours = await _until(run_dir, lambda s: s.halt.acks.get("p0r0", ("",))[0] == "halted")
            assert (ours.halt.by, ours.halt.mode) == ("P1", "halt")
            await _until(theirs, lambda s: s.halt.acks.get("p0r0", ("",))[0] == "halted")
            box = over_relay.mailboxes(theirs, RUN)[0]
            assert box.tokens == (TOKENS[1],)
            box.exchange(over_relay.consent(theirs, RUN, "full"), over_relay.CONSENT)
            assert (await _until(run_dir, lambda s: s.consents)).consents == (("full", "P1"),)
    finally:
        for service in services:
            service.cancel()
        await asyncio.gather(*services, return_exceptions=True)
        journal.close()


def test_as_many_domains_must_sign_as_the_profile_wants() -> None:
    created = ev.RunCreated(
        run="r",
        profile_name="t",
        job_kind="private",
        replicas=1,
        pipeline_stages=1,
        tensor=1,
        stages=[],
        profile={"consent": {"full": 2}},
    )
    s = fold([created, ev.Consent(what="full", by="P0"), ev.Consent(what="full", by="P0")])
    assert domain.missing(s, "full") == "full needs the signatures of 2 of 3 domains; signed by P0"
    assert domain.missing(s, "terminate") == ""
    assert domain.missing(fold([ev.Consent(what="full", by="P2")], s), "full") == ""


def test_what_cannot_be_exported_or_joined_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no relay for its domains"):
        domain.export(tmp_path, fold([]), 0)
    (tmp_path / spawn.DOMAIN).write_text("{}")
    with pytest.raises(ConfigError, match="one domain's console"):
        spawn.start(tmp_path, spawn.CONDUCTOR)
    with pytest.raises(UnreadableError, match="not a domain's file"):
        domain.join({"party": "x"})
