"""A party of several workers under proofs: it learns the same, and one false message at one place ends the step for
all of them before any worker opens anything of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from proof_kit import alter
from replica_kit import MemoryGroups, Outcome, job_of, rows_of, train, weights

from uvcc_engine.contract.errors import ConfigError, PeerLostError, ProofFailedError, ProtocolError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.layer_list import model_to_json
from uvcc_engine.model.definition.specs import Attention, Dense, Embedding, LayerNorm, ModelSpec
from uvcc_engine.model.layer_types.residual import Residual
from uvcc_engine.model.layer_types.tied import Tied
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger, ProductNotes
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.products import proved_truncation
from uvcc_engine.parallel.pipeline import FORWARD
from uvcc_engine.plane.api import Tag
from uvcc_engine.proofs.step_proof import NOTHING_PROVED, prove_protocol
from uvcc_engine.sharding import fleet_proof, sharded_training
from uvcc_engine.sharding.microbatches import IN_FLIGHT_VARIABLE, StreamRuntimes
from uvcc_engine.transcript.formats import kinds

TWO = Topology(2)
LINEAR: dict[str, Any] = {"layers": ["linear"], "reveal": ("loss",)}


def _same_everywhere(found: Outcome) -> None:
    """All workers tell the same, and the replicas of a party hold the same shares."""
    first = found.workers[Coord(0, 0, 0, 0)]
    assert set(found.errors.values()) == {None}
    for c, one in found.workers.items():
        assert (one.losses, one.metrics) == (first.losses, first.metrics)
        for name, tensor in found.workers[Coord(0, c.party, c.stage, c.tensor)].state.items():
            assert torch.equal(tensor, one.state[name]), (c, name)


def test_two_proved_replicas_learn_what_two_unproved_and_one_proved_do() -> None:
    """Each gradient is truncated by itself: a unit for each replica and step."""
    shape: dict[str, Any] = LINEAR | {"reveal": ("loss", "accuracy")}
    job = job_of(verify="proofs", **shape)
    proved, again = train(job, TWO), train(job, TWO)
    plain, alone = train(job_of(**shape), TWO), train(job_of(verify="proofs", **shape, batch=4), Topology(1))
    _same_everywhere(proved)
    first = proved.workers[Coord(0, 0, 0, 0)]
    for other in (plain, alone):
        assert np.allclose(first.losses, other.workers[Coord(0, 0, 0, 0)].losses, atol=2.0**-9)  # type: ignore[arg-type]
        size = TWO if other is plain else Topology(1)
        for a, b in zip(weights(job, proved), weights(job, other, size), strict=True):
            assert np.allclose(a, b, atol=2.0**-9)
        assert first.metrics == other.workers[Coord(0, 0, 0, 0)].metrics
    for c, one in proved.workers.items():  # two runs, one result, bit for bit
        assert one.losses == again.workers[c].losses
        assert one.coins == again.workers[c].coins
        assert all(torch.equal(one.state[name], tensor) for name, tensor in again.workers[c].state.items())
    _has_coins_of_its_own_at_every_place(proved, job)


def _has_coins_of_its_own_at_every_place(proved: Outcome, job: PrivateJob) -> None:
    coins = {
        (c.replica, epoch): one.coins[epoch] for c, one in proved.workers.items() for epoch in range(job.steps + 1)
    }
    assert len(set(coins.values())) == 2 * (job.steps + 1)
    for c, one in proved.workers.items():
        assert one.coins == proved.workers[Coord(c.replica, 0, 0, 0)].coins
        assert all(claims > 0 for claims in one.claims)


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        pytest.param("proofs", Topology(1, 2, 1, 2), marks=pytest.mark.ci(__file__)),
        pytest.param("products", Topology(1, 1, 2, 2), marks=pytest.mark.ci(__file__)),
        pytest.param("products", Topology(2, 2), marks=pytest.mark.ci(__file__)),
    ],
    ids=str,
)
def test_stages_tensor_ranks_and_microbatches_are_proved_as_well(
    mode: str, size: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a convolution before a pool, a norm, and a residual where that can be split. Tensor ranks split one layer by
    columns and the next by rows."""
    monkeypatch.setenv(IN_FLIGHT_VARIABLE, "2")
    net: list[Any] = [{"image": [1, 4, 4]}, {"conv": {"channels": 2, "kernel": 3, "padding": 1}}, "relu"]
    block: list[Any] = [{"linear": 8}, "gelu"]
    block = block if size.tensor > 1 else [{"residual": block}]
    norm = ["layer-norm"] if size.replicas > 1 else []
    layers = [*net, {"avg-pool": 2}, "flatten", *norm, *block, "linear"]
    steps = 2 if size.tensor > 1 else 1  # there only the loss after a step tells of its weights
    more: dict[str, Any] = {"features": 16, "layers": layers, "steps": steps, "reveal": ("loss", "accuracy")}
    more |= {"batch": 2 * size.tensor}  # a line of every microbatch for each tensor rank
    job = job_of(verify=mode, **more)
    proved, plain = train(job, size), train(job_of(**more), size)
    _same_everywhere(proved)
    at = Coord(0, 0, 0, 0)
    assert np.allclose(proved.workers[at].losses, plain.workers[at].losses, atol=2.0**-9)  # type: ignore[arg-type]
    if size.tensor == 1:
        for a, b in zip(weights(job, proved, size), weights(job, plain, size), strict=True):
            assert np.allclose(a, b, atol=2.0**-8)
    for c, one in proved.workers.items():  # the same slices of the same weights
        for name, tensor in one.state.items():
            assert tensor.shape == plain.workers[c].state[name].shape
    assert all(claims > 0 for one in proved.workers.values() for claims in one.claims)


@pytest.mark.parametrize(
    ("mode", "size", "job"),
    [
        pytest.param(
            "proofs",
            TWO,
            {"optimizer": "adam", "lr": 0.01, "clip_norm": 0.5, "weight_decay": 0.1},
            marks=pytest.mark.ci(__file__),
        ),
        ("products", Topology(1, 1, 2), {"optimizer": "adam", "lr": 0.01, "clip_norm": 0.5, "objective": "mse"}),
        ("products", Topology(1, 2), {"clip_norm": 0.1, "layers": [{"linear": 2}, {"dropout": 0.5}, "linear"]}),
    ],
    ids=str,
)
def test_optimizers_metrics_and_validation_of_several_workers_are_proved(
    mode: str, size: Topology, job: dict[str, Any]
) -> None:
    """Answers are gathered at one worker of each party, which measures them; all prove before it opens."""
    told = ("loss", "val_loss", "val_accuracy", "accuracy", "confusion")
    keys = {"layers": ["linear"], "reveal": told, "val_rows": 4, "keep_best": True, "val_every": 1, "steps": 1} | job
    rows = rows_of(job_of())
    data = Dataset(
        rows.train_x[:12], rows.train_y[:12], rows.test_x, rows.test_y, 2, rows.train_x[12:], rows.train_y[12:]
    )
    proved, plain = (train(job_of(verify=verify, **keys), size, data=data) for verify in (mode, "off"))
    _same_everywhere(proved)
    first, other = (found.workers[Coord(0, 0, 0, 0)] for found in (proved, plain))
    assert np.allclose(first.losses, other.losses, atol=2.0**-10)  # type: ignore[arg-type]
    assert first.validated == pytest.approx(other.validated, abs=2.0**-10)
    assert len(first.validated) == 2
    assert first.metrics == other.metrics
    if size.tensor == 1:
        for a, b in zip(weights(job_of(**keys), proved, size), weights(job_of(**keys), plain, size), strict=True):
            assert np.allclose(a, b, atol=2.0**-9)
    assert all(claims > 0 for one in proved.workers.values() for claims in one.claims)


@pytest.mark.slow  # 18 threads of a language model
@pytest.mark.parametrize("size", [Topology(1, 1, 2), Topology(2, 2)], ids=str)
def test_a_language_model_is_proved_however_it_is_split(size: Topology) -> None:
    """Heads and the rows of its table over tensor ranks, its block and its head over stages."""
    block = (LayerNorm(4), Dense(4, 12), Attention(3, 4, 2), Dense(4, 4))
    spec = ModelSpec("letters", (Embedding(3, 3, 4), Residual(block), Dense(4, 3)), 9, 3, 3)
    letters = np.random.default_rng(2).integers(0, 3, (10, 4))
    x, y = np.eye(3)[letters[:, :3]].reshape(10, 9), letters[:, 1:]
    data = Dataset(x[:8], y[:8], x[8:], y[8:], 3)
    keys = {"steps": 2, "batch": 2, "test_rows": 2, "lr": 0.5, "momentum": 0.9}
    job = PrivateJob.from_json({"model": model_to_json(spec), "verify": "proofs"} | keys)
    proved, plain = train(job, size, data=data), train(replace(job, verify="off"), size, data=data)
    _same_everywhere(proved)
    first, other = (found.workers[Coord(0, 0, 0, 0)] for found in (proved, plain))
    # each is within 2^-10 of the loss in clear, which a step of rate 0.5 has raised
    assert np.allclose(first.losses, other.losses, atol=2.0**-9)  # type: ignore[arg-type]
    assert first.metrics == other.metrics
    assert all(claims > 0 for one in proved.workers.values() for claims in one.claims)


def test_the_gradient_of_a_table_that_is_used_twice_is_whole_where_each_use_is_a_claim() -> None:
    """In a step of two microbatches; either use alone would leave the table elsewhere."""
    letters = np.random.default_rng(2).integers(0, 3, (10, 3))
    spec = ModelSpec("tied", (Tied(Embedding(3, 2, 4), (Dense(4, 4),)),), 6, 3, 2)
    asked, after = np.eye(3)[letters[:, :2]].reshape(10, 6), letters[:, 1:]
    data = Dataset(asked[:8], after[:8], asked[8:], after[8:], 3)
    job = PrivateJob.from_json({"model": model_to_json(spec), "steps": 1, "batch": 4, "test_rows": 2, "lr": 0.5})
    size = Topology(microbatches=2)
    plain = train(job, size, data=data)
    for mode in ("products", "proofs"):
        proved = train(replace(job, verify=mode), size, data=data)
        _same_everywhere(proved)
        for a, b in zip(weights(job, proved, size), weights(job, plain, size), strict=True):
            assert np.allclose(a, b, atol=2.0**-12)


# -- lies --------------------------------------------------------------------------------------------------------------


def _lie_in_a_product(liar: Coord, epoch: int, how: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The liar alters its summand of one product of a step, and goes on with it."""
    honest, lied = proved_truncation.truncate_proved_protocol, list[int]()

    def lying(rt: Runtime, notes: ProductNotes, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == str(liar) and rt.epoch == epoch and not lied:
            lied.append(rt.epoch)
            alter(notes.z, how, random.Random(how))
        return honest(rt, notes, *args, **kwargs)

    monkeypatch.setattr("uvcc_engine.mpc.products.arithmetic.truncate_proved_protocol", lying)
    return lied


def _ended_unopened(found: Outcome, liar: int, epoch: int) -> None:
    """Nobody opened anything of the step, and the party that judges the liar released nothing; every worker of the
    honest parties names a pair with the liar in it."""
    assert all(c.party != (liar + 1) % 3 for c, _ in found.opened_in(epoch))
    for c, one in found.workers.items():
        assert len(one.losses) == epoch, c
        if c.party != liar:
            assert isinstance(one.error, ProofFailedError), (c, one.error)
            assert liar in one.error.pair, c
            assert f"step {epoch}" in one.error.what
        else:
            assert one.error is not None


@pytest.mark.parametrize(
    ("liar", "epoch", "how"),
    [
        (Coord(1, 0, 0, 0), 0, "one"),
        (Coord(1, 1, 0, 0), 0, "top"),
        (Coord(1, 2, 0, 0), 1, "random"),
        pytest.param(Coord(1, 0, 0, 0), 1, "bit", marks=pytest.mark.ci(__file__)),
        pytest.param(Coord(0, 1, 0, 0), 1, "swapped", marks=pytest.mark.ci(__file__)),
        pytest.param(Coord(1, 2, 0, 0), 0, "all", marks=pytest.mark.ci(__file__)),
    ],
    ids=str,
)
def test_a_lie_in_a_product_of_one_replica_ends_the_step_at_both_before_anything_is_opened(
    liar: Coord, epoch: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lied = _lie_in_a_product(liar, epoch, how, monkeypatch)
    found = train(job_of(verify="products", **LINEAR), TWO)
    assert lied
    _ended_unopened(found, liar.party, epoch)
    sister = found.workers[Coord(1 - liar.replica, (liar.party + 1) % 3, 0, 0)].error
    assert isinstance(sister, ProofFailedError)
    assert sister.what.startswith(f"p{(liar.party + 1) % 3}r{liar.replica}s0t0: "), "it does not say at which place"


@pytest.mark.parametrize(
    ("party", "how"),
    [
        (0, "bit"),
        pytest.param(1, "random", marks=pytest.mark.ci(__file__)),
        pytest.param(2, "all", marks=pytest.mark.ci(__file__)),
    ],
)
def test_a_lie_in_any_message_of_one_replica_ends_the_step_at_both(party: int, how: str) -> None:
    """The liar's every seventh message of the step, such as bits and what is dealt, and it goes on with them."""
    liar, lied = Coord(1, party, 0, 0), list[int]()

    def lie(epoch: int, number: int, data: torch.Tensor) -> None:
        if epoch == 0 and number % 7 == party:
            lied.append(number)
            alter(data, how, random.Random(number))

    adam = {"optimizer": "adam", "lr": 0.01} if party == 1 else {}
    found = train(job_of(verify="proofs", **(LINEAR | {"steps": 1} | adam)), TWO, stands_by=lie, liar=liar)
    assert len(lied) > 2
    _ended_unopened(found, party, 0)


def test_the_same_lie_goes_through_where_nothing_is_proved() -> None:
    def lie(epoch: int, number: int, data: torch.Tensor) -> None:
        if epoch == 0 and number == 1:
            alter(data, "random", random.Random(1))

    found = train(job_of(**LINEAR), TWO, stands_by=lie, liar=Coord(1, 1, 0, 0))
    assert set(found.errors.values()) == {None}
    honest = train(job_of(**LINEAR), TWO)
    at = Coord(0, 0, 0, 0)
    assert found.workers[at].losses != honest.workers[at].losses, "the lie changed nothing"


def test_one_message_changed_on_its_way_to_one_peer_is_found() -> None:
    """The sender goes on with what it should have sent: its two peers hold different things."""
    changed: list[Tag] = []

    def tamper(c: Coord, dst: int, tag: Tag, body: bytes) -> bytes:
        if c != Coord(1, 2, 0, 0) or dst != 1 or tag.kind != kinds.RESHARE or tag.epoch != 0:
            return body
        changed.append(tag)
        return bytes([body[0] ^ 1]) + body[1:]

    found = train(job_of(verify="products", **LINEAR), TWO, tamper=tamper)
    assert changed
    for c, one in found.workers.items():
        assert isinstance(one.error, ProtocolError), c


@pytest.mark.parametrize(
    ("liar", "size"), [(Coord(0, 1, 0, 0), Topology(1, 2)), (Coord(0, 1, 0, 1), Topology(1, 1, 2))]
)
def test_a_lie_in_one_stage_or_tensor_rank_ends_the_step_in_the_other_that_opens(
    liar: Coord, size: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    lied = _lie_in_a_product(liar, 0, "top", monkeypatch)
    found = train(job_of(verify="products", steps=1, reveal=("loss",)), size)
    assert lied
    _ended_unopened(found, 1, 0)


# -- lies that are no message ------------------------------------------------------------------------------------------


def test_a_party_that_adds_up_its_replicas_wrongly_is_found_by_the_next_products_proof() -> None:
    """It is local work, which nothing proves; but both others hold what it should have got."""
    liar, lied = Coord(1, 1, 0, 0), list[int]()

    def prepare(c: Coord, trainer: Any, groups: MemoryGroups) -> None:
        if c != liar:
            return
        honest = groups.dp.sum_slices

        def wrong(x: torch.Tensor) -> Callable[[], torch.Tensor]:
            total = honest(x)()
            if not lied:
                lied.append(1)
                total += 1 << 14
            return lambda: total

        groups.dp.sum_slices = wrong  # type: ignore[method-assign]

    found = train(job_of(verify="products", **LINEAR), TWO, prepare=prepare)
    assert lied
    assert found.opened_in(0), "the loss of the step before is as it was"
    _ended_unopened(found, 1, 1)


def test_a_party_that_adds_up_what_is_opened_wrongly_is_found_when_it_is_opened() -> None:
    liar = Coord(0, 1, 0, 0)

    def prepare(c: Coord, trainer: Any, groups: MemoryGroups) -> None:
        if c == liar:
            honest = groups.dp.sum_
            groups.dp.sum_ = lambda x: honest(x).add_(1)  # type: ignore[method-assign]

    found = train(job_of(verify="products", **LINEAR), TWO, prepare=prepare)
    for c, one in found.workers.items():
        if c.party == 1:
            continue  # it knows what it would have got
        assert one.losses == [], c
        if c.replica == 0:
            assert isinstance(one.error, ProtocolError)
            assert "disagree on a share opened" in one.error.what
            assert "1" in one.error.what


# -- proofs of another place or epoch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["sister", "yesterday"])
def test_a_proof_of_another_place_or_epoch_is_refused(whose: str) -> None:
    """Party 1 sends at one place what it sent at the other, or in the step before: the same claims and sizes."""
    kept: dict[tuple[Any, ...], bytes] = {}
    news, used = threading.Condition(), list[Tag]()
    liar, epoch = Coord(1, 1, 0, 0), 1

    def tamper(c: Coord, dst: int, tag: Tag, body: bytes) -> bytes:
        if tag.kind not in (kinds.PROOF, kinds.COIN) or c.party != 1 or tag.stream or len(body) < 1024:
            return body
        with news:
            kept[c, dst, tag] = body
            news.notify_all()
            if c != liar or tag.epoch != epoch:
                return body
            where = (Coord(0, 1, 0, 0), dst, tag) if whose == "sister" else (c, dst, tag._replace(epoch=0))
            news.wait_for(lambda: where in kept, 120.0)
            used.append(tag)
            return kept[where]

    job = job_of(verify="products", **(LINEAR | {"momentum": 0.0}))
    found = train(job, TWO, tamper=tamper)
    assert used
    _ended_unopened(found, 1, epoch)


# -- nobody opens before all have proved -------------------------------------------------------------------------------


def test_a_worker_that_waits_for_its_own_proof_only_would_open_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: what the tests above look for is there, then."""

    def alone(groups: Any, work: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
        found = work()
        return found, good(found)

    monkeypatch.setattr(fleet_proof, "judged_together", alone)
    liar = Coord(1, 1, 0, 0)
    lied = _lie_in_a_product(liar, 0, "top", monkeypatch)
    found = train(job_of(verify="products", **LINEAR), TWO)
    assert lied
    assert {c.party for c, _ in found.opened_in(0)} == {0, 1, 2}
    with pytest.raises(AssertionError):
        _ended_unopened(found, 1, 0)


def test_the_ledger_lets_nothing_be_opened_that_did_not_wait_for_the_sisters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever opens: a step that forgets to ask them is stopped by its runtime."""

    def own_proof_only(runtimes: Any, groups: Any, values: Any) -> Any:
        runtimes.collect_claims()
        proved = runtimes.main.run(prove_protocol(runtimes.main))
        return proved, [runtimes.main.run(open_ring_protocol(runtimes.main, value)) for value in values]

    monkeypatch.setattr(sharded_training, "prove_together", own_proof_only)
    found = train(job_of(verify="products", **(LINEAR | {"steps": 1})), TWO)
    assert not found.opened
    openers = [found.workers[Coord(0, p, 0, 0)].error for p in range(3)]
    stopped = [error.what for error in openers if isinstance(error, ConfigError)]
    assert stopped, openers
    assert all("the claims of this party's other workers" in what for what in stopped)


def test_a_pass_on_another_stream_keeps_the_main_one_from_opening() -> None:
    main, other = (SimpleNamespace(ledger=None, epoch=0, begin_epoch=int) for _ in range(2))
    main.ledger = ledger = ClaimLedger()
    runtimes = StreamRuntimes(lambda stream: other, main)  # type: ignore[arg-type,return-value]
    ledger.check_message(kinds.OPEN, proved=False, opening=True)
    assert runtimes.of(FORWARD, 0) is other
    ledger.claim()
    with pytest.raises(ConfigError, match="passes"):
        ledger.check_message(kinds.OPEN, proved=False, opening=True)
    ledger.all_proved()
    ledger.check_message(kinds.OPEN, proved=False, opening=True)


def test_a_ledger_waits_again_after_every_new_claim() -> None:
    ledger = ClaimLedger(sisters=True)
    with pytest.raises(ConfigError, match="other workers"):
        ledger.check_message(kinds.OPEN, proved=False, opening=True)
    ledger.all_proved()
    ledger.check_message(kinds.OPEN, proved=False, opening=True)
    ledger.claim()
    with pytest.raises(ConfigError, match="other workers"):
        ledger.check_message(kinds.OPEN, proved=False, opening=True)


class _Told:
    """Groups of two workers of a party, one of which has said something already."""

    def __init__(self, word: bytes | Exception) -> None:
        self.place, self.alone = type("Place", (), {"coord": Coord(0, 0, 0, 0)})(), False
        self.tp = self.pp = type("Alone", (), {"size": 1})()
        self.dp, self.size, self._word = self, 2, word

    def start_dp(self) -> None:
        """It is up."""

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        if isinstance(self._word, Exception):
            raise self._word
        theirs = torch.frombuffer(bytearray(self._word.ljust(len(x), b"\0")), dtype=torch.uint8)
        return [x, theirs]


def test_what_a_sister_says_is_raised_with_its_pair_and_a_failure_of_ones_own_comes_first() -> None:
    held: Any = lambda: NOTHING_PROVED  # noqa: E731

    def fails() -> Any:
        raise ProofFailedError("step 3: Grüße", "go on", pair=(1, 2), prover=2)

    assert fleet_proof.agree(_Told(b""), held) is NOTHING_PROVED  # type: ignore[arg-type]
    word = fleet_proof.encoded("p0r1s0t0", ProofFailedError("w" * 999, '"' * 999, pair=(0, 2), prover=0))
    assert len(word) <= fleet_proof.WORD_BYTES
    with pytest.raises(ProofFailedError, match="p0r1s0t0: www") as told:
        fleet_proof.agree(_Told(word), held)  # type: ignore[arg-type]
    assert (told.value.pair, told.value.prover) == ((0, 2), 0)
    with pytest.raises(ProtocolError, match="a coin") as broken:
        fleet_proof.agree(_Told(fleet_proof.encoded("p0r1s0t0", ProtocolError("a coin", party=2))), held)  # type: ignore[arg-type]
    assert (broken.value.party, isinstance(broken.value, ProofFailedError)) == (2, False)
    with pytest.raises(ProofFailedError, match="a worker of this party"):
        fleet_proof.agree(_Told(b"{"), held)  # type: ignore[arg-type]
    for other in (b"", word, PeerLostError("a sister is gone")):
        with pytest.raises(ProofFailedError, match="step 3"):
            fleet_proof.agree(_Told(other), fails)  # type: ignore[arg-type]
    with pytest.raises(PeerLostError):
        fleet_proof.agree(_Told(PeerLostError("a sister is gone")), held)  # type: ignore[arg-type]
