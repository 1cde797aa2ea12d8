"""A client of a served model and its relay: the three parties here answer each row with itself, over a real relay."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_kit import OWNER, PARTIES, client_token, free_port, until

from uvcc_engine.contract.errors import ConfigError, PeerLostError, UnreachableError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.owner import asking
from uvcc_engine.owner.asking import Asker, ServedModelOf, Ticket, only_asker
from uvcc_engine.plane.links.relay_mail import RelayMail, box_of
from uvcc_engine.relay.relay_roles import Role, number_of
from uvcc_engine.sealing.queries import LARGEST, ServedJob, most_rows, open_query, seal_answer
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty

GROUP = "test.full"
ALICE = Identity(bytes([40]) * 32, bytes([41]) * 32)
WIDTH = 3


class Relay:
    """A relay process that comes back to the same port and database."""

    def __init__(self, folder: Path) -> None:
        self.config, self.url = folder / "relay.json", f"http://127.0.0.1:{free_port()}"
        credentials: list[dict[str, Any]] = [{"party": p, "group": GROUP, "token": token(p)} for p in range(3)]
        credentials.append({"client": 0, "group": GROUP, "token": client_token(0)})
        said = {"db": "relay.db", "ready_file": "ready.json", "listen": self.url.removeprefix("http://")}
        self.config.write_text(json.dumps(said | {"credentials": credentials}))
        self.config.chmod(0o600)
        self.start()

    def start(self) -> None:
        place = self.config.with_name("ready.json")
        place.unlink(missing_ok=True)
        self.process = subprocess.Popen([sys.executable, "-m", "uvcc_engine.relay", "--config", str(self.config)])
        until(lambda: place.exists() and place.read_text(), 500, "the relay")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(120)


def token(party: int) -> str:
    return f"the token of party {party}"


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    running = Relay(tmp_path)
    yield running
    running.kill()


def served(url: str, secret: str = "") -> ServedModelOf:
    job = PrivateJob(task="serve", steps=99, batch=2, reveal=("answers",), clients=(ALICE.public.x25519,))
    policy = Policy.build(
        job=job.to_json(),
        model_hash="00" * 32,
        code_hash="11" * 32,
        topology=Topology(),
        parties=[PolicyParty(n, p.public, "local", "here") for n, p in enumerate(PARTIES)],
        owner=OWNER.public.x25519,
        commitments=["33" * 32] * 3,
        reveal=[("answers", "clients")],
        limits={},
        nonce="44" * 32,
    )
    ticket = Ticket(url, GROUP, secret or client_token(0), 0, policy.to_json(), {})
    fits = ServedJob(policy.sid_job.hex(), job.clients, WIDTH, job.batch, job.frac_bits)
    return ServedModelOf(ticket, policy, job, fits, WIDTH)


class Parties:
    """Three parties whose answer to a row is the row. ``asked``: the ids of the queries that they answered."""

    def __init__(self, model: ServedModelOf) -> None:
        self._model = model
        self.asked: set[str] = set()
        self._mail = [RelayMail(model.ticket.relay, token(p), box_of("served", GROUP)) for p in range(3)]

    def look(self) -> None:
        """Until a query lies there, which the relay hands out again once it comes back."""
        while not self._mail[0].take(2.0):
            continue

    def answer(self, queries: int) -> None:
        """Answer so many queries at least, and whatever else lies there."""
        for party, mail in enumerate(self._mail):
            mail.close()
            answered = 0
            while True:
                found = mail.take(2.0 if queries else 0.0)
                for message in found:
                    self._one(party, message.payload)
                mail.acknowledge([message.delivery for message in found])
                answered += len(found)
                if answered >= queries:
                    break

    def _one(self, party: int, box: bytes) -> None:
        fits, me = self._model.served, PARTIES[party]
        query = open_query(box, fits, party=party, identity=me)
        about = {"query": query.id, "batch": 0, "attempt": 1, "party": party, "frac_bits": fits.frac_bits}
        to = {"client": fits.clients[0], "sid_job": fits.sid_job}
        sealed = seal_answer((query.first, query.second), identity=me, **about, **to)  # type: ignore[arg-type]
        self._mail[party].send(number_of(Role.CLIENT, 0), query.id[:40], sealed)
        self.asked.add(query.id)


def test_a_relay_that_is_killed_while_queries_wait_is_waited_for(relay: Relay) -> None:
    """What was asked and answered lies on its disk; a client gave up at the first request that met nobody."""
    model, x = served(relay.url), np.arange(12.0).reshape(4, 3)
    asker, parties = Asker(model, ALICE, 300.0), Parties(model)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(asker.ask, x)
        parties.look()
        relay.kill()
        relay.start()
        parties.answer(2)
        assert np.array_equal(asking.result(500), x)
    asker.close()
    assert len(parties.asked) == 2


def test_whoever_waits_is_told_for_what(relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(asking, "POLL_S", 0.0)
    told: list[str] = []
    asker = Asker(served(relay.url), ALICE, 0.5, told.append)
    with pytest.raises(PeerLostError, match="2 queries had no whole answer"):
        asker.ask(np.zeros((2 * asker._model.served.most_rows, WIDTH)))  # nobody answers
    asker.close()
    (said,) = told
    assert said.startswith("waits: 2 queries have no whole answer yet; the model may be held, or halted; gives up in ")
    ALICE.store(tmp_path / "alice")
    key = tmp_path / "alice"
    with (
        only_asker(key, 1.0),
        pytest.raises(ConfigError, match="others asked with the key"),
        only_asker(key, 0.2, told.append),
    ):
        pass
    assert told[1:] == [f"waits: another asks with the key in {key}; gives up in 0 s"]


def test_a_relay_that_refuses_a_client_is_not_asked_again(relay: Relay) -> None:
    asker = Asker(served(relay.url, "a token of nobody"), ALICE, 1e9)
    with pytest.raises(UnreachableError, match="is the token its own"):
        asker.ask(np.zeros((1, WIDTH)))
    asker.close()


def test_two_who_ask_with_one_key_take_turns(relay: Relay, tmp_path: Path) -> None:
    """Whoever takes a client's mail takes all of it: of two at once each took away what the other waited for."""
    key = tmp_path / "key"
    ALICE.store(key)
    model, over = served(relay.url), threading.Event()
    parties = Parties(model)
    rows = [np.full((2, WIDTH), float(n)) for n in range(6)]

    def ask(x: Any) -> Any:
        with only_asker(key, 300.0):
            asker = Asker(model, ALICE, 300.0)
            try:
                return asker.ask(x)
            finally:
                asker.close()

    def serve() -> None:
        while not over.is_set():
            parties.answer(0)

    with ThreadPoolExecutor(7) as pool:
        serving = pool.submit(serve)
        try:
            found = list(pool.map(ask, rows))
        finally:
            over.set()
        serving.result(300)
    assert all(np.array_equal(a, b) for a, b in zip(found, rows, strict=True))
    with only_asker(key, 0.0), pytest.raises(ConfigError, match="has a key of its own"), only_asker(key, 0.0):
        pass


def test_a_query_and_its_answer_fit_into_a_message_of_the_relay(relay: Relay) -> None:
    assert most_rows(64, 3, 3) == 64
    assert most_rows(64, 150_528, 1000) == 3  # pictures: 64 of them were refused with 413, 16 with 403
    assert most_rows(4096, 4, 5000) == 104  # few columns, and many classes
    assert most_rows(8, 1 << 22, 1) == 1
    mail = RelayMail(relay.url, client_token(0), box_of("served", GROUP))
    assert mail.send(0, "the largest", bytes(LARGEST + 4096))
    with pytest.raises(UvccError, match="answers 403"):
        mail.send(0, "more", bytes(2 * LARGEST + 4096))
    mail.close()
