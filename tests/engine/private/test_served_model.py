"""A model that three parties serve: every query answered once, to whoever asked and nobody else, come what may."""

from __future__ import annotations

import csv
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES, Fleet, Zygote, client_token, relay_links, until

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UvccError, VerificationError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.run_files.control import HaltRequest, write_halt
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.data.sets import Floats, load_digits
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.plaintext import forward, train_plaintext
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.owner import asking
from uvcc_engine.plane.links.relay_mail import RelayMail, box_of
from uvcc_engine.sealing.inputs import SharedInputs, encode_fixed, share_tensors
from uvcc_engine.sealing.joint import open_set
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sealing.queries import OpenedQuery, ServedJob, open_query, seal_query
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, read_signatures
from uvcc_engine.worker.query_desk import STALE_S, QueryDesk
from uvcc_engine.worker.served_batches import (
    MOST_LISTED,
    BatchTerms,
    DeskWord,
    WaitingQuery,
    agreed,
    held_to,
    in_turn,
    read_batch,
    read_word,
)
from uvcc_engine.worker.served_model import ServedModel

torch.set_num_threads(1)
PUBLIC = tuple(p.public for p in PARTIES)
ALICE, BOB, EVE = (Identity(bytes([n]) * 32, bytes([n + 1]) * 32) for n in (40, 50, 60))
JOB = PrivateJob(
    model="mlp-digits",
    task="serve",
    steps=5,
    batch=8,
    reveal=("answers",),
    clients=(ALICE.public.x25519, BOB.public.x25519),
    idle=3.0,  # who has asked before the start is not waited for
    checkpoint_every=2,
)
SERVED = ServedJob("ab" * 32, JOB.clients, 64, 8, 16)


@pytest.fixture(scope="module")
def weights() -> tuple[Floats, ...]:
    return train_plaintext(PrivateJob(steps=40), load_digits(7)).weights


def shared(weights: tuple[Floats, ...], job: PrivateJob = JOB) -> SharedInputs:
    model = {f"weight.{i}": encode_fixed(f"weight.{i}", w, 16) for i, w in enumerate(weights)}
    return share_tensors(model, 16, PUBLIC, OWNER, seed=1, purpose=Purpose.of(job, [OWNER.public.x25519]))


def exact(weights: tuple[Floats, ...], x: Floats) -> list[int]:
    return (
        forward(find_model("mlp-digits"), [torch.from_numpy(w) for w in weights], torch.from_numpy(x))
        .argmax(1)
        .tolist()
    )


# -- what is agreed ----------------------------------------------------------------------------------------------------


def query(n: int, client: int = 0, rows: int = 1) -> WaitingQuery:
    return WaitingQuery(f"{n:064x}", client, rows)


def test_a_batch_is_what_waits_everywhere_one_client_after_the_other() -> None:
    flood = [query(n, 0, 2) for n in range(6)]
    few = [query(n, 1, 2) for n in range(10, 12)]
    words = {0: DeskWord((*flood, *few)), 1: DeskWord((*few, *flood)), 2: DeskWord((*flood[1:], *few))}
    assert agreed(words, 0, 8) == (flood[1], few[0], flood[2], few[1])
    assert agreed(words, 1, 4) == (few[0], flood[1])  # whose turn begins moves on
    assert agreed(words | {2: DeskWord()}, 0, 8) is None
    assert in_turn([query(1, 0, 9), query(2, 1, 1)], 0, 8) == (query(2, 1, 1),)
    assert agreed({p: DeskWord(idle=p == 0) for p in range(3)}, 0, 8) == ()
    assert agreed({p: DeskWord(idle=p == 1) for p in range(3)}, 0, 8) is None


def test_what_one_party_has_on_disk_is_what_all_answer() -> None:
    waiting = DeskWord((query(1), query(2)))
    words = {0: waiting, 1: replace(waiting, decided=(query(2),)), 2: waiting}
    assert agreed(words, 3, 8) == (query(2),)
    with pytest.raises(ProtocolError, match="P1 and P2 answered other queries in step 3"):
        agreed(words | {2: replace(waiting, decided=(query(1),))}, 3, 8)


def test_a_batch_that_no_honest_party_has_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    """One domain could name a batch of more rows than the job's: the others put it on disk, and came to it again
    whenever they were started."""
    told = list[dict[str, Any]]()
    desk = QueryDesk(
        tmp_path,
        SERVED,
        party=0,
        identity=PARTIES[0],
        link=LinkSpec(kind="relay", relay_url="http://127.0.0.1:9", group="g"),
        tell=lambda name, fields: told.append(fields["why"]),
        clock=iter(range(0, 10**6, 100)).__next__,  # a minute and more between any two: each is told at once
    )
    never, may = BatchTerms(8, may_be_empty=False), BatchTerms(8, may_be_empty=True)
    waits = DeskWord((query(1, 0, 5), query(2, 1, 5)))
    honest = {p: waits for p in range(3)}
    lies: list[tuple[DeskWord, str]] = [
        (replace(waits, decided=waits.waiting), "P1 names a batch of 10 rows, more than job.batch (8)"),
        (replace(waits, decided=()), "P1 names a batch of no query in a job that never idles"),
    ]
    for lie, why in lies:
        assert desk.agree(honest | {1: lie}, 0, never) == (query(1, 0, 5),)
        assert why in told[-1]
    assert desk.agree({p: DeskWord(idle=p == 0) for p in range(3)}, 0, never) is None
    assert "P0 says that nobody asks any more in a job that never idles" in told[-1]
    assert desk.agree({p: DeskWord(idle=p == 0) for p in range(3)}, 0, may) == ()
    assert desk.agree(honest | {1: replace(waits, decided=())}, 0, may) == ()
    desk.close()
    assert held_to(never, honest | {2: replace(waits, decided=(query(1, 0, 5),))}, {query(1).id}) == (
        honest,
        [f"P2 names a batch with query {query(1).id[:12]}, which is answered already"],
    )
    fair = honest | {2: replace(waits, decided=(query(2, 1, 5),))}
    assert held_to(never, fair, set()) == (fair, [])


def test_a_peers_word_may_be_anything() -> None:
    word = DeskWord((query(1), query(2, 1, 3)), (query(1),), idle=True)
    assert read_word(word.encode()) == word
    for bad in (b"", b"[]", b"{}", b'{"idle": 1, "waiting": []}', b'{"idle": true, "waiting": 3}', b"\xff" * 9):
        assert isinstance(read_word(bad), Malformed)
    for bad in ([["zz", 0, 1]], [[f"{1:064x}", -1, 1]], [[f"{1:064x}", 0, 0]], [[f"{1:064x}", True, 1]], [[]],
                [query(1).to_json()] * 2, [query(n).to_json() for n in range(513)], {}):  # fmt: skip
        assert read_batch(bad) is None


# -- what a client seals -----------------------------------------------------------------------------------------------


def test_only_a_clients_whole_query_of_this_session_opens() -> None:
    made = seal_query(np.ones((3, 64)), SERVED, ALICE, PUBLIC)
    parts = [open_query(made.boxes[p], SERVED, party=p, identity=PARTIES[p]) for p in range(3)]
    assert {(q.id, q.client, q.rows) for q in parts} == {(made.id, 0, 3)}
    assert np.array_equal(parts[0].first + parts[1].first + parts[2].first, np.full((3, 64), 1 << 16))
    spoilt = [
        (seal_query(np.ones((3, 64)), SERVED, EVE, PUBLIC).boxes[0], "no client"),
        (made.boxes[1], "another recipient"),
        (seal_query(np.ones((3, 64)), replace(SERVED, sid_job="cd" * 32), ALICE, PUBLIC).boxes[0], "another session"),
        (seal_query(np.ones((9, 64)), replace(SERVED, most_rows=9), ALICE, PUBLIC).boxes[0], "1 to 8 rows"),
        (seal_query(np.ones((3, 63)), replace(SERVED, features=63), ALICE, PUBLIC).boxes[0], "not of 3 rows"),
        (seal_query(np.ones((3, 64)), replace(SERVED, frac_bits=12), ALICE, PUBLIC).boxes[0], "not of 3 rows"),
        (made.boxes[0][:-1] + bytes([made.boxes[0][-1] ^ 1]), "altered"),
        (b"", "not a sealed file"),
    ]
    for box, why in spoilt:
        with pytest.raises(UvccError, match=why):
            open_query(box, SERVED, party=0, identity=PARTIES[0])
    for shape in ((9, 64), (3, 63), (0, 64)):
        with pytest.raises(ConfigError, match="a query of shape"):
            seal_query(np.ones(shape), SERVED, ALICE, PUBLIC)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clients": ()}, "lists 0 clients"),
        ({"clients": (ALICE.public.x25519,) * 2}, "2 clients, 1 of them"),
        ({"clients": ("alice.pub",)}, "no key"),
        ({"reveal": ("predictions",)}, "'serve' reveals 'answers' and nothing else"),
        ({"task": "train"}, "reveals it, and nothing else"),
        ({"task": "infer", "reveal": ("predictions",)}, "job.clients in task 'infer'"),
        ({"idle": -1.0}, "idle"),
    ],
)
def test_a_job_that_serves_says_whom(change: dict[str, Any], words: str) -> None:
    assert PrivateJob.from_json(JOB.to_json()) == JOB
    with pytest.raises(ConfigError) as refused:
        replace(JOB, **change)
    assert words in str(refused.value)


@pytest.mark.parametrize("verify", ["off", "products", "proofs", "covert"])
def test_nonsense_of_one_client_leaves_anothers_answer_as_it_is(verify: Any, weights: tuple[Floats, ...]) -> None:
    """However much of it is proved; nonsense is proved as well as sense."""
    made, x = shared(weights), load_digits(7).test_x[:4]
    wild = np.random.default_rng(3).integers(-(1 << 62), 1 << 62, (3, 3, 64))
    good = seal_query(x, SERVED, BOB, PUBLIC)

    def body(rt: Runtime) -> Any:
        inputs = open_set(made.boxes[rt.party], party=rt.party, identity=PARTIES[rt.party], **made.public())
        served = ServedModel(rt, replace(JOB, verify=verify), find_model(JOB.model), inputs)
        mine = open_query(good.boxes[rt.party], SERVED, party=rt.party, identity=PARTIES[rt.party])
        served.batch = [OpenedQuery("0" * 64, 0, 3, wild[rt.party], wild[(rt.party + 1) % 3]), mine]
        rt.begin_epoch(0)
        proved = served.step(0).proved
        assert (proved is not None and proved.claims > 0) == (verify != "off")
        found = served.answers[1][1]
        served.batch = []
        rt.begin_epoch(1)
        served.step(1)
        return found, served.answers, served.weight_halves()[0]["rows_answered"]

    parts = LocalPlanes(2).run_three(body)
    answers = sum(p[0] for p in parts) / 2.0**16
    assert np.array_equal(answers.sum(1), np.ones(4))
    assert answers.argmax(1).tolist() == exact(weights, x)
    assert [p[1] for p in parts] == [[], [], []]  # nobody asked in the second
    assert int(sum(p[2][0] for p in parts)) == 7


def test_a_query_that_one_party_alone_holds_is_dropped_and_one_beyond_the_list_is_not(tmp_path: Path) -> None:
    made = [seal_query(np.ones((1, 64)), SERVED, ALICE, PUBLIC) for _ in range(2)]
    (tmp_path / "queries").mkdir()
    for one in made:
        (tmp_path / "queries" / f"{one.id}.box").write_bytes(one.boxes[0])
    now, told = [0.0], list[str]()
    desk = QueryDesk(
        tmp_path,
        SERVED,
        party=0,
        identity=PARTIES[0],
        link=LinkSpec(kind="relay", relay_url="http://127.0.0.1:9", group="g"),
        tell=lambda name, fields: told.append(f"{name} {fields}"),
        clock=lambda: now[0],
    )
    kept = WaitingQuery(made[0].id, 0, 1)
    flooded = DeskWord(tuple(query(n) for n in range(MOST_LISTED)))
    now[0] = STALE_S + 1.0
    desk.forget_stale([flooded, flooded])
    assert {q.id for q in desk.word(0, 0).waiting} == {one.id for one in made}
    desk.forget_stale([DeskWord((kept, query(1))), DeskWord((kept,))])
    assert desk.word(0, 0).waiting == (kept,)
    assert [line for line in told if "not sent to all three parties" in line]
    desk.close()


# -- real workers ------------------------------------------------------------------------------------------------------


def ticket(fleet: Fleet, number: int, folder: Path) -> Path:
    """As ``uvcc infer ticket`` writes it."""
    link = fleet.links[0]
    found = {
        "relay": link["relay_url"],
        "group": link["group"],
        "token": client_token(number),
        "client": number,
        "policy": fleet.policy.to_json(),
        "signatures": {str(p): t for p, t in read_signatures(fleet.home(0) / "signatures.json").items()},
    }
    path = folder / f"client{number}.ticket"
    path.write_text(json.dumps(found))
    return path


class Client(threading.Thread):
    """Asks beside the others by the command that clients have."""

    def __init__(self, fleet: Fleet, number: int, who: Identity, x: Floats, folder: Path, wait: float = 150.0) -> None:
        super().__init__()
        self.folder = folder / f"asks{number}"
        self.folder.mkdir()
        who.store(self.folder / "key")
        np.save(self.folder / "q.npy", x)
        self.out = self.folder / "answers.csv"
        self.argv = ["rows", "--ticket", ticket(fleet, number, folder), "--key", self.folder / "key", "--wait", wait]
        self.argv += ["--data", self.folder / "q.npy", "--out", self.out]
        self.code = -1
        self.start()

    def run(self) -> None:
        self.code = asking.main([str(a) for a in self.argv])

    def answers(self) -> list[int]:
        self.join(200)
        assert self.code == 0
        return [int(row["answer"]) for row in csv.DictReader(self.out.open())]


def test_two_clients_are_answered_each_its_own_and_replays_are_not(
    tmp_path: Path, zygote: Zygote, weights: tuple[Floats, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = load_digits(7).test_x
    with relay_links(tmp_path, clients=2) as links:
        fleet = Fleet(tmp_path, zygote, JOB, links, shared(weights))
        served = ServedJob(fleet.policy.sid_job.hex(), JOB.clients, 64, 8, 16)
        mail = RelayMail(links[0]["relay_url"], client_token(0), box_of("served", "test.full"))
        stranger = seal_query(x[:2], served, EVE, PUBLIC)
        anothers = seal_query(x[:2], served, BOB, PUBLIC)  # Bob's box, sent with Alice's token
        for party in range(3):
            mail.send(party, "noise", b"\x00" * 500)
            mail.send(party, "stranger", stranger.boxes[party])
            mail.send(party, "anothers", anothers.boxes[party])
        known = seal_query(x[:2], served, ALICE, PUBLIC)
        for name in ("known", "again"):
            for party in range(3):
                mail.send(party, name, known.boxes[party])
        half = seal_query(x[:1], served, ALICE, PUBLIC)  # to one party only: never answered
        mail.send(0, "half", half.boxes[0])
        sent, send = [], RelayMail.send

        def noted(mail: RelayMail, *message: Any, **more: Any) -> bool:
            found = send(mail, *message, **more)
            sent.append(message)
            return found

        monkeypatch.setattr(RelayMail, "send", noted)
        alice = Client(fleet, 0, ALICE, x[:11], tmp_path)
        bob = Client(fleet, 1, BOB, x[100:113], tmp_path)
        until(lambda: len(sent) >= 3 * 4, 500, "two queries of each")  # before anybody answers, and fills other batches
        fleet.launch()
        assert alice.answers() == exact(weights, x[:11])
        assert bob.answers() == exact(weights, x[100:113])
        assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    batches = fleet.events(0, "batch_answered")
    assert sum(b["rows"] for b in batches) == 26
    assert sum(b["queries"] for b in batches) == 5
    assert batches[-1]["refused"] == 4  # noise, the stranger, Bob's by Alice's mail, the repetition
    assert batches[-1]["rows"] == 0  # nobody asked any more
    assert [b["step"] for b in batches] == [0, 1, 2, 3, 4]
    (refused, *_) = fleet.events(0, "queries_refused")
    assert refused["why"]
    assert len({fleet.result(p)["result_hash"] for p in range(3)}) == 1


@pytest.mark.slow
def test_killed_and_halted_between_batches_it_goes_on_and_answers_once(
    tmp_path: Path, zygote: Zygote, weights: tuple[Floats, ...]
) -> None:
    x = load_digits(7).test_x
    job = replace(JOB, steps=8, idle=20.0, checkpoint_every=3)
    with relay_links(tmp_path, clients=2) as links:
        fleet = Fleet(tmp_path, zygote, job, links, shared(weights, job))
        fleet.launch()
        first = Client(fleet, 0, ALICE, x[:30], tmp_path, wait=120)
        until(lambda: len(fleet.events(1, "batch_answered")) >= 2, 500, "two batches")
        os.kill(fleet.pids[1], signal.SIGKILL)
        assert fleet.wait()[0] != 0
        decided = (fleet.dir(1) / "queries" / "decided.jsonl").read_text()
        fleet.launch(resume=True)
        assert first.answers() == exact(weights, x[:30])
        again = (fleet.dir(1) / "queries" / "decided.jsonl").read_text()
        assert again.startswith(decided)  # what was decided was repeated, not decided anew
        write_halt(fleet.dir(2), HaltRequest("halt", "stop", fleet.run))
        assert fleet.wait() == [0, 0, 0]
        assert {fleet.exit(p)["status"] for p in range(3)} == {"halted"}
        at = fleet.exit(0)["step"]
        assert fleet.launch(resume=True)
        late = Client(fleet, 1, BOB, x[50:55], tmp_path, wait=120)
        assert late.answers() == exact(weights, x[50:55])
        assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    answered = [json.loads(line) for line in (fleet.dir(0) / "queries" / "decided.jsonl").read_text().splitlines()]
    assert [a["step"] for a in answered] == list(range(8))
    ids = [q[0] for a in answered for q in a["batch"]]
    assert len(ids) == len(set(ids)) == 5
    assert at == next(a["step"] for a in answered if a["batch"] and a["batch"][0][1] == 1)


def test_a_ticket_is_of_one_client_and_one_policy(tmp_path: Path, zygote: Zygote, weights: tuple[Floats, ...]) -> None:
    links = [{"kind": "relay", "relay_url": "http://127.0.0.1:9", "token_file": "t", "group": "g"}] * 3
    fleet = Fleet(tmp_path, zygote, JOB, links, shared(weights))
    path = ticket(fleet, 0, tmp_path)
    made = asking.read_ticket(path, ALICE, fleet.policy.hash.hex())
    assert made.served.features == 64
    with pytest.raises(ConfigError, match="whose key is another"):
        asking.read_ticket(path, BOB)
    with pytest.raises(ConfigError, match="you asked for"):
        asking.read_ticket(path, ALICE, "00" * 32)
    said = json.loads(path.read_text())
    said["policy"]["job"]["clients"][0] = BOB.public.x25519  # a ticket that somebody rewrote
    said["policy"]["job"]["clients"][1] = ALICE.public.x25519
    path.write_text(json.dumps(said))
    with pytest.raises(VerificationError, match="signature"):
        asking.read_ticket(path, BOB)
    path.write_text(json.dumps(said | {"policy": Policy.to_json(fleet.policy), "more": 1}))
    with pytest.raises(ConfigError, match="more"):
        asking.read_ticket(path, ALICE)
    path.write_text("{")
    with pytest.raises(UvccError):
        asking.read_ticket(path, ALICE)


def test_a_relay_that_is_away_is_said(tmp_path: Path, zygote: Zygote, weights: tuple[Floats, ...]) -> None:
    links = [{"kind": "relay", "relay_url": "http://127.0.0.1:9", "token_file": "t", "group": "g"}] * 3
    fleet = Fleet(tmp_path, zygote, JOB, links, shared(weights))
    asker = asking.Asker(asking.read_ticket(ticket(fleet, 0, tmp_path), ALICE), ALICE, 1.0)
    with pytest.raises(UvccError, match="does not answer"):
        asker.ask(np.zeros((1, 64)))
