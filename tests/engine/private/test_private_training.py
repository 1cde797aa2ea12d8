"""Training on shares against clear float training, and clear float training against torch's own autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES, opened_digits

from uvcc_engine.contract.errors import ConfigError, ProtocolError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset, batch_rows, load_digits
from uvcc_engine.model import layers as nn
from uvcc_engine.model import losses
from uvcc_engine.model.definition.specs import find_model, initial_weights
from uvcc_engine.model.layer_types.dense import DenseLayer
from uvcc_engine.model.layer_types.relu import ReluLayer
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct
from uvcc_engine.mpc.products.arithmetic import public
from uvcc_engine.plane.api import Tag
from uvcc_engine.sealing.inputs import open_inputs, share_dataset
from uvcc_engine.transcript.formats import kinds

torch.set_num_threads(1)
TINY = PrivateJob(steps=4, batch=32, test_rows=60)


def train(job: PrivateJob, planes: LocalPlanes | None = None) -> list[dict[str, Any]]:
    """Train in-process; per party: losses, correct, rounds of the first step, weights, digests."""
    inputs = opened_digits(job)

    def body(rt: Runtime) -> dict[str, Any]:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party])
        found: dict[str, Any] = {"losses": []}
        for step in range(job.steps):
            rt.begin_epoch(step)
            found["losses"].append(trainer.step(step).loss)
            found.setdefault("rounds", rt.rounds)
        rt.begin_epoch(job.steps)
        found["correct"] = trainer.count_correct()
        found["weights"] = trainer.weights
        found["digests"] = [trainer.component_digest(c, b"blind") for c in ("first", "second")]
        return found

    return (planes or LocalPlanes(3)).run_three(body)


def weights_of(results: list[dict[str, Any]]) -> list[np.ndarray[Any, Any]]:
    return [reconstruct([r["weights"][i] for r in results]).numpy() for i in range(len(results[0]["weights"]))]


@pytest.fixture(scope="module")
def tiny() -> list[dict[str, Any]]:
    return train(TINY)


def torch_training(job: PrivateJob, data: Dataset) -> tuple[list[np.ndarray[Any, Any]], list[float]]:
    """The same training by torch's modules, autograd, cross-entropy and SGD."""
    start = initial_weights(find_model(job.model), job.seed, job.frac_bits)
    parts: list[torch.nn.Module] = []
    for i, w in enumerate(start):
        layer = torch.nn.Linear(len(w) - 1, w.shape[1], dtype=torch.float64)
        layer.weight.data, layer.bias.data = torch.from_numpy(w[:-1].T.copy()), torch.from_numpy(w[-1].copy())
        parts += [layer] if i == len(start) - 1 else [layer, torch.nn.ReLU()]
    net = torch.nn.Sequential(*parts)
    sgd = torch.optim.SGD(net.parameters(), lr=job.lr, momentum=job.momentum)
    seen: list[float] = []
    for step in range(job.steps):
        rows = batch_rows(job.seed, step, job.batch, len(data.train_x))
        sgd.param_groups[0]["lr"] = job.lr_at(step)
        sgd.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            net(torch.from_numpy(data.train_x[rows])), torch.from_numpy(data.train_y[rows])
        )
        loss.backward()
        sgd.step()
        seen.append(loss.item())
    linear = [p for p in parts if isinstance(p, torch.nn.Linear)]
    return [np.vstack([p.weight.detach().numpy().T, p.bias.detach().numpy()]) for p in linear], seen


def test_the_clear_reference_is_what_torch_trains() -> None:
    job = replace(TINY, steps=12)
    data = load_digits(job.seed, job.test_rows)
    ours, (weights, losses_) = train_plaintext(job, data), torch_training(job, data)
    assert np.allclose(ours.losses, losses_, atol=1e-12)
    assert all(np.allclose(a, b, atol=1e-12) for a, b in zip(ours.weights, weights, strict=True))


def test_private_steps_follow_the_clear_ones(tiny: list[dict[str, Any]]) -> None:
    clear = train_plaintext(TINY, load_digits(TINY.seed, TINY.test_rows))
    assert np.allclose(tiny[0]["losses"], clear.losses, atol=4e-3)
    for ours, theirs in zip(weights_of(tiny), clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < 4e-3
    assert [r["losses"] for r in tiny] == [tiny[0]["losses"]] * 3
    assert abs(tiny[0]["correct"] - clear.correct) <= 1


def test_a_step_takes_at_most_23_rounds_and_the_loss_adds_none(tiny: list[dict[str, Any]]) -> None:
    assert max(r["rounds"] for r in tiny) <= 23
    silent = train(replace(TINY, steps=1, reveal=("accuracy",)))
    assert silent[0]["rounds"] == tiny[0]["rounds"]
    assert silent[0]["losses"] == [None]


def test_the_same_job_gives_the_same_shares_and_component_digests_agree(tiny: list[dict[str, Any]]) -> None:
    again = train(TINY)
    for party in range(3):
        assert tiny[party]["digests"] == again[party]["digests"]
        assert tiny[party]["digests"][1] == tiny[(party + 1) % 3]["digests"][0]
        for one, two in zip(tiny[party]["weights"], again[party]["weights"], strict=True):
            assert one.first.equal(two.first)
            assert one.second.equal(two.second)
    assert train(replace(TINY, steps=3))[0]["digests"][0] != tiny[0]["digests"][0]


@pytest.mark.parametrize("model", ["logistic-digits", "mlp-digits"])
@pytest.mark.ci(__file__)
def test_training_on_shares_is_as_accurate_as_in_clear(model: str) -> None:
    job = PrivateJob(model=model, loss_every=10)
    clear = train_plaintext(job, load_digits(job.seed, job.test_rows))
    private = train(job)[0]
    accuracy = private["correct"] / job.test_rows
    assert abs(accuracy - clear.accuracy) <= 0.01
    assert accuracy >= (0.94 if model == "mlp-digits" else 0.90)
    revealed = [loss for loss in private["losses"] if loss is not None]
    assert len(revealed) == 7
    assert revealed[-1] < 0.3 < 2.0 < revealed[0]


def test_gradients_are_those_of_autograd() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(6, 5)), np.eye(3)[rng.integers(0, 3, 6)]
    starts = [torch.from_numpy(rng.normal(size=s) * 0.7).requires_grad_() for s in ((6, 4), (5, 3))]
    ones = torch.ones(6, 1, dtype=torch.float64)
    inputs = torch.from_numpy(x).requires_grad_()
    hidden = torch.relu(torch.cat([inputs, ones], 1) @ starts[0])
    logits = torch.cat([hidden, ones], 1) @ starts[1]
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y), reduction="sum")
    loss.backward()  # type: ignore[no-untyped-call]

    def body(rt: Runtime) -> tuple[list[Share], Share, float]:
        found: list[Share] = []
        first, second = (DenseLayer(public(rt, w.detach(), f=16)) for w in starts)
        relu = ReluLayer()
        stack: list[nn.Layer] = [first, relu, second]

        def update(layer: nn.Layer, grad: Share) -> Any:
            found.append((yield from layer.weight_gradient_protocol(rt, grad, 1.0)))

        def steps() -> Any:
            z = yield from nn.forward_protocol(rt, stack, public(rt, torch.from_numpy(x), f=16))
            powers = yield from losses.powers_protocol(rt, z)
            targets = public(rt, torch.from_numpy(y), f=16)
            grad = yield from losses.gradient_protocol(rt, powers, targets)
            mean = yield from losses.mean_loss_protocol(rt, powers, targets)
            yield from nn.backward_protocol(rt, stack, grad, update)
            below = yield from second.input_gradient_protocol(rt, grad)
            below = yield from relu.input_gradient_protocol(rt, below)
            return (yield from first.input_gradient_protocol(rt, below)), mean

        below, mean = rt.run(steps())
        return found, below, mean

    results = LocalPlanes(5).run_three(body)
    assert results[0][2] == pytest.approx(loss.item() / 6, abs=2e-3)
    wanted = [inputs.grad, starts[1].grad, starts[0].grad]
    got = [[r[1] for r in results], *([r[0][i] for r in results] for i in range(2))]
    for shares, exact in zip(got, wanted, strict=True):
        assert exact is not None
        assert (reconstruct(shares) - exact).abs().max() < 5e-3


def test_the_count_of_correct_rows_is_exact() -> None:
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(size=(90, 10)), rng.integers(0, 10, 90)
    logits[:30] = np.eye(10)[labels[:30]] * 2 + 0.1

    def body(rt: Runtime) -> int:
        z, y = public(rt, torch.from_numpy(logits), f=16), public(rt, torch.from_numpy(np.eye(10)[labels]), f=16)
        return rt.run(losses.correct_protocol(rt, z, y))

    assert LocalPlanes(1).run_three(body) == [int((logits.argmax(1) == labels).sum())] * 3


def test_a_lie_in_an_opening_stops_the_run_and_names_the_pair() -> None:
    def lie(src: int, dst: int, tag: Tag, body: bytes) -> bytes:
        # the opened loss is the only message of 8 bytes from P1
        if src == 1 and tag.kind == kinds.OPEN and len(body) == 8 and tag.epoch == 1:
            return bytes([body[0] ^ 1]) + body[1:]
        return body

    quiet = replace(TINY, steps=2)
    silent = PrivateJob(**{**quiet.to_json(), "reveal": ("loss", "accuracy")})
    with pytest.raises(ProtocolError) as error:
        train(silent, LocalPlanes(3, tamper=lie))
    assert "1" in error.value.what


def test_state_goes_on_exactly_where_it_was() -> None:
    inputs = opened_digits(TINY)

    def body(rt: Runtime) -> bool:
        model = find_model(TINY.model)
        one, two = (PrivateTrainer(rt, TINY, model, inputs[rt.party]) for _ in range(2))
        rt.begin_epoch(0)
        one.step(0)
        state = one.state()
        names = [f"{k}.{i}.{c}" for k in ("weight", "velocity") for i in (0, 1) for c in ("lo", "hi")]
        assert sorted(state) == sorted(names)
        before = one.component_digest("first", b""), one.component_digest("second", b"")
        two.load_state(state)
        with pytest.raises(ConfigError, match="does not fit"):
            two.load_state({k: v for k, v in state.items() if k != "weight.0.lo"})
        with pytest.raises(ConfigError, match="does not fit"):
            two.load_state({k: v.to(torch.int32) for k, v in state.items()})
        return before == (two.component_digest("first", b""), two.component_digest("second", b""))

    assert LocalPlanes(3).run_three(body) == [True] * 3


def test_weights_that_do_not_fit_are_refused() -> None:
    model = find_model("mlp-digits")
    with pytest.raises(ConfigError, match="do not fit mlp-digits"):
        nn.build(model, [Share(torch.zeros(3, 3, dtype=torch.int64), torch.zeros(3, 3, dtype=torch.int64))])


def test_rates_leave_room_for_the_product_they_scale() -> None:
    for frac_bits in (12, 16, 20, 24):
        job = PrivateJob(frac_bits=frac_bits)
        for step in range(job.steps):
            exact = job.lr_at(step) / job.batch
            assert job.rate_at(step) == pytest.approx(exact, rel=0.07 if frac_bits > 17 else 1e-3)
    job = PrivateJob(steps=10, momentum=0.5, lr=1.0)
    assert job.decay_at(0) == 0.0
    assert job.decay_at(5) == pytest.approx(0.5 * 0.5 / 0.6)
    assert PrivateJob(schedule="constant", momentum=0.5).decay_at(5) == 0.5


def test_inputs_at_another_scale_train_alike() -> None:
    job = replace(TINY, frac_bits=12, steps=2)
    data = load_digits(job.seed, job.test_rows)
    made = share_dataset(data, 12, tuple(p.public for p in PARTIES), OWNER, seed=1)
    inputs = [open_inputs(made.boxes[i], party=i, identity=PARTIES[i], **made.public()) for i in range(3)]

    def body(rt: Runtime) -> list[float | None]:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs[rt.party])
        found = []
        for step in range(job.steps):
            rt.begin_epoch(step)
            found.append(trainer.step(step).loss)
        return found

    assert np.allclose(LocalPlanes(9).run_three(body)[0], train_plaintext(job, data).losses, atol=0.03)  # type: ignore[arg-type]
