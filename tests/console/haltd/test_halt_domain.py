"""One domain's console: with its own credentials only it sees the others, halts everybody, and signs its consent."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from relaykit import COORD, QUICK, RUN, TOKENS, make_run, relay  # noqa: F401

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.provider import Pod
from uvcc_console.fleet.ssh_keys import KEY_FILE
from uvcc_console.halt import relay_path as over_relay
from uvcc_console.halt.published_roots import Published
from uvcc_console.haltd import service as service_module
from uvcc_console.haltd.service import Service
from uvcc_console.runs import domain, processes
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.peer_protocol import relay_words
from uvcc_engine.contract.run_files.control import read_halt
from uvcc_engine.transcript.signed.orders import BEAT_NAMESPACE
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.worker.relay_control import Orders, Roots


async def _until(path: Path, wanted: Any) -> Snapshot:
    journal = Journal(path / processes.JOURNAL, readonly=True)
    try:
        async with asyncio.timeout(120):
            while not wanted(s := read_all(journal)):
                await asyncio.sleep(0.02)
        return s
    finally:
        journal.close()


async def test_a_domain_halts_all_with_its_own_key_and_the_operator_sees_who(relay: str, tmp_path: Path) -> None:  # noqa: F811
    identity = Identity.create(tmp_path / "identity")
    run_dir, journal = make_run(relay, identity.public.ed25519)
    keys = domain.order_keys(run_dir)
    under = {"halt_readers": domain.readers(run_dir), "halt_seal": domain.order_seal(run_dir)}
    exported = json.loads(json.dumps(domain.export(run_dir, read_all(journal), 1)))
    secrets = [*(t for p, t in enumerate(TOKENS) if p != 1), (run_dir / KEY_FILE).read_text(), "127.0.0.1:1"]
    assert not [s for s in secrets if s in json.dumps(exported)]  # nobody else's token, no operator key, no address
    theirs = domain.join(exported)
    pod = tmp_path / "pod"
    pod.mkdir()
    (pod / "token").write_text(TOKENS[0])
    link = LinkSpec(relay_url=relay, token_file=str(pod / "token"), halt_keys=list(keys.values()), **under)

    def beat() -> dict[str, Any]:
        asked = read_halt(pod, RUN)
        if asked is None:
            return {"step": 4, "phase": "train", "loss": 0.5}
        phase = "hold" if asked.mode == "hold" else "halted"
        return {"step": 5, "phase": phase, "halt_nonce": asked.nonce, "checkpoint": "c0ffee"}

    roots = Roots()
    for epoch in range(40):
        roots.note("epoch_root", {"coord": COORD, "epoch": epoch, "root": f"{epoch:064x}", "pairs": {"p1r0s0t0": "ab"}})

    services = [asyncio.create_task(Service(folder, times=QUICK).run()) for folder in (run_dir, theirs)]
    try:
        sign = partial(identity.sign, BEAT_NAMESPACE)
        with Orders(link, RUN, COORD, pod, sign=sign, last=beat, told=lambda a: None, roots=roots.listed):
            seen = await _until(theirs, lambda s: COORD in s.workers)
            assert (seen.workers[COORD].step, seen.workers[COORD].beat["loss"]) == (4, 0.5)
            assert (seen.workers[COORD].root_epoch, seen.workers[COORD].root) == (39, f"{39:064x}")
            assert [a.epoch for a in seen.agreement] == [0, 16, *range(32, 40)]
            desk = Journal(theirs / processes.JOURNAL, source="tui")
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


def _listed(coord: str, epochs: range, peer: str, digest: str = "same") -> str:
    return json.dumps([{"epoch": e, "root": f"{coord}-{e}", "pairs": {peer: digest}} for e in epochs])


def test_published_roots_are_told_once_and_the_first_disagreement_is_a_fork() -> None:
    published = Published()
    first = published.take("p0r0s0t0", relay_words.roots(_listed("p0r0s0t0", range(3), "p1r0s0t0")))
    again = published.take("p0r0s0t0", relay_words.roots(_listed("p0r0s0t0", range(1, 4), "p1r0s0t0")))
    assert [e.epoch for e in (*first, *again) if isinstance(e, ev.RootReported)] == [0, 1, 2, 3]
    agreed = published.take("p1r0s0t0", relay_words.roots(_listed("p1r0s0t0", range(2), "p0r0s0t0")))
    assert not [e for e in agreed if isinstance(e, ev.ForkDetected)]
    forked = published.take("p1r0s0t0", relay_words.roots(_listed("p1r0s0t0", range(2, 4), "p0r0s0t0", "other")))
    (fork,) = [e for e in forked if isinstance(e, ev.ForkDetected)]
    assert (fork.epoch, fork.parties) == (2, [0, 1])
    assert fold([*first, *agreed, fork]).fork


@pytest.mark.parametrize(
    "damaged", [None, "", "{", "[1]", '[{"epoch": 1}]', '[{"epoch": "x", "root": "a", "pairs": {}}]']
)
def test_a_damaged_list_of_roots_is_no_list(damaged: object) -> None:
    assert Published().take("p0r0s0t0", relay_words.roots(damaged)) == []


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


async def test_nothing_is_terminated_before_as_many_domains_have_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, journal = make_run("http://127.0.0.1:1", Identity.create(tmp_path / "identity").public.ed25519)
    created = next(e for _, e in journal.since(0) if isinstance(e, ev.RunCreated))
    journal.append(dataclasses.replace(created, profile={**created.profile, "consent": {"terminate": 2}}))
    asked: list[str] = []

    def provider_for(*_: Any) -> Any:
        asked.append("provider")
        raise ConfigError("far enough")

    monkeypatch.setattr(service_module, "provider_for", provider_for)
    service = Service(run_dir, times=QUICK)
    for domains in ((), ("P0",)):
        journal.append(*(ev.Consent(what="terminate", by=by) for by in domains))
        service._view.poll()
        with pytest.raises(ConfigError, match="needs the signatures of 2 of 3 domains"):
            await service._terminate("p0r0")
    assert asked == []
    journal.append(ev.Consent(what="terminate", by="P2"))
    service._view.poll()
    with pytest.raises(ConfigError, match="far enough"):
        await service._terminate("p0r0")
    told = [e for _, e in journal.since(0, kinds=("alert",)) if isinstance(e, ev.Alert)]
    assert [(a.name, a.subject) for a in told] == [("consent", "p0r0")]
    await service._channels.close()
    service._relay.close()
    journal.close()


async def test_a_pod_that_another_run_kept_is_terminated_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rung looked for a pod of this run's name, found none, and called the one that ran on proven gone."""
    run_dir, journal = make_run("http://127.0.0.1:1", Identity.create(tmp_path / "identity").public.ed25519)
    created = next(e for _, e in journal.since(0) if isinstance(e, ev.RunCreated))
    journal.append(
        dataclasses.replace(created, profile={**created.profile, "fleet": {"attach_prefix": "uvcc-kept-1-"}})
    )
    there = ["uvcc-kept-1-p0r0", "uvcc-kept-1-p0r0x"]

    class Shop:
        async def list(self, prefix: str) -> list[Pod]:
            return [Pod(n, 0, 0, "x", n) for n in there if n.startswith(prefix)]

        async def delete(self, pod: Pod) -> None:
            there.remove(pod.name)

        async def close(self) -> None: ...

    monkeypatch.setattr(service_module, "provider_for", lambda *_: Shop())
    service = Service(run_dir, times=QUICK)
    service._view.poll()
    await service._terminate("p0r0")
    assert there == ["uvcc-kept-1-p0r0x"]
    await service._channels.close()
    service._relay.close()
    journal.close()


def test_party_opens_the_newest_console_of_that_domain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "running", lambda run_dir, name: 1)
    assert main(["--party", "1", "--headless"]) != 0
    assert "no console of P1's domain was joined here" in capsys.readouterr().err
    for number, (name, party) in enumerate((("old-p1", 1), ("new-p1", 1), ("newer-p0", 0))):
        folder = paths.run_dir(name)
        folder.mkdir(parents=True)
        (folder / processes.DOMAIN).write_text(json.dumps({"run": name, "party": party}))
        os.utime(folder / processes.DOMAIN, (number, number))
    assert main(["--party=1", "--headless"]) == 0
    assert "joined as new-p1" in capsys.readouterr().err
    assert main(["domain", "open", "old", "--party", "1", "--headless"]) == 0
    assert "joined as old-p1" in capsys.readouterr().err


def test_what_cannot_be_exported_or_joined_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no relay for its domains"):
        domain.export(tmp_path, fold([]), 0)
    (tmp_path / processes.DOMAIN).write_text("{}")
    with pytest.raises(ConfigError, match="one domain's console"):
        processes.start(tmp_path, processes.CONDUCTOR)
    with pytest.raises(UnreadableError, match="not a domain's file"):
        domain.join({"party": "x"})
