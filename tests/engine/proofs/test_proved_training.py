"""A training whose products, or messages, are proved: it learns the same; a lie ends it before a loss is opened."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ProofFailedError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.layer_list import model_to_json
from uvcc_engine.model.definition.specs import Attention, Dense, Embedding, LayerNorm, ModelSpec
from uvcc_engine.model.layer_types.residual import Residual
from uvcc_engine.mpc.foundation.claim_ledger import ProductNotes
from uvcc_engine.mpc.foundation.rounds import Round
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.products import proved_truncation

_BLOCK = (LayerNorm(4), Dense(4, 12), Attention(3, 4, 2), Dense(4, 4))
_TURNED = (Dense(4, 8), Attention(3, 4, 2, kv_heads=1, rotary=100.0))
LETTERS = (
    ModelSpec("gpt", (Embedding(3, 3, 4), Residual(_BLOCK), Dense(4, 3)), 9, 3, 3),
    ModelSpec("turned", (Embedding(3, 3, 4, places=False), *_TURNED, Dense(4, 3)), 9, 3, 3),
)
NET = [{"linear": 4}, "relu", "linear"]
IMAGES: list[Any] = [
    *[{"image": [1, 8, 8]}, {"conv": {"channels": 2, "kernel": 3, "padding": 1}}, "relu", {"avg-pool": 2}],
    *[{"conv": {"channels": 3, "kernel": 2, "padding": 0}}, "relu", {"max-pool": 3}, "linear"],
]


def _data() -> tuple[Any, Any]:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    return x, (x[:, 0] > 0).astype(int)


def _fit(**more: Any) -> simulate.SimulatedFit:
    x, y = _data()
    return simulate.fit(NET, x, y, **({"steps": 2, "batch": 8, "seed": 3} | more))


@pytest.mark.parametrize("verify", ["products", "proofs"])
def test_a_proved_training_learns_what_an_unproved_one_does(verify: str) -> None:
    plain, proved = _fit(), _fit(verify=verify)
    assert np.allclose(plain.losses, proved.losses, atol=2.0**-9)
    for a, b in zip(plain.weights, proved.weights, strict=True):
        assert np.allclose(a, b, atol=2.0**-9)
    assert plain.accuracy == proved.accuracy
    assert proved.rounds > plain.rounds


@pytest.mark.parametrize("verify", [pytest.param("products", marks=pytest.mark.ci(__file__)), "proofs"])
def test_a_proved_training_of_convolutions_learns_what_an_unproved_one_does(verify: str) -> None:
    """Two convolutions, so that the gradient goes through one of them to the other, and pooling of both kinds."""
    x = torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    y = (x[:, 0, 0, 0] > 0).astype(int)
    plain = simulate.fit(IMAGES, x, y, steps=1, batch=4, seed=3)
    proved = simulate.fit(IMAGES, x, y, steps=1, batch=4, seed=3, verify=verify)
    assert np.allclose(plain.losses, proved.losses, atol=2.0**-9)
    for a, b in zip(plain.weights, proved.weights, strict=True):
        assert np.allclose(a, b, atol=2.0**-8)
    assert plain.accuracy == proved.accuracy


@pytest.mark.parametrize("verify", ["products", pytest.param("proofs", marks=pytest.mark.ci(__file__))])
def test_a_proved_training_of_activations_and_residuals_learns_what_an_unproved_one_does(verify: str) -> None:
    x, y = _data()
    curved: list[Any] = [{"linear": 4}, "gelu", {"residual": ["silu"]}]
    net = [{"linear": 4}, "tanh", {"residual": curved}, {"leaky-relu": 0.1}, "sigmoid", "linear"]
    plain = simulate.fit(net, x, y, steps=1, batch=4, seed=3)
    proved = simulate.fit(net, x, y, steps=1, batch=4, seed=3, verify=verify)
    assert np.allclose(plain.losses, proved.losses, atol=2.0**-9)
    for a, b in zip(plain.weights, proved.weights, strict=True):
        assert np.allclose(a, b, atol=2.0**-9)


@pytest.mark.parametrize("verify", [pytest.param("products", marks=pytest.mark.ci(__file__)), "proofs"])
def test_a_proved_training_of_norms_learns_what_an_unproved_one_does(verify: str) -> None:
    """A row's squares are added up before their one truncation, as without proofs."""
    x, y = _data()
    net: list[Any] = [{"linear": 4}, "layer-norm", {"residual": [{"linear": 4}, "rms-norm"]}, "linear"]
    plain = simulate.fit(net, x, y, steps=2, batch=4, seed=3)
    proved = simulate.fit(net, x, y, steps=2, batch=4, seed=3, verify=verify)
    assert np.allclose(plain.losses, proved.losses, atol=2.0**-9)
    for a, b in zip(plain.weights, proved.weights, strict=True):
        assert np.allclose(a, b, atol=2.0**-9)
    assert np.abs(proved.weights[1] - np.stack([np.ones(4), np.zeros(4)])).max() > 2.0**-8, "the norm learnt nothing"


@pytest.mark.parametrize(
    ("spec", "verify"),
    [
        pytest.param(*value, marks=pytest.mark.ci(__file__) if n % 2 != 1 else ())
        for n, value in enumerate(zip(LETTERS, ("proofs", "products"), strict=True))
    ],
    ids=["gpt", "turned"],
)
def test_a_proved_training_with_attention_learns_what_an_unproved_one_does(spec: ModelSpec, verify: Any) -> None:
    """Products of several heads and rows at once; with places that are turned, and heads that share keys."""
    letters = np.random.default_rng(2).integers(0, 3, (10, 4))
    x, y = np.eye(3)[letters[:, :3]].reshape(10, 9), letters[:, 1:]
    data = Dataset(x[:8], y[:8], x[8:], y[8:], 3)
    keys: dict[str, Any] = {"steps": 1, "batch": 2, "test_rows": 2, "lr": 0.5}
    job = PrivateJob.from_json({"model": model_to_json(spec)} | keys)
    plain, proved = simulate.train(job, data), simulate.train(replace(job, verify=verify), data)
    assert np.allclose(plain.losses, proved.losses, atol=2.0**-9)
    for a, b in zip(plain.weights, proved.weights, strict=True):
        assert np.allclose(a, b, atol=2.0**-9)


@pytest.mark.parametrize(
    "liar", [0, pytest.param(1, marks=pytest.mark.ci(__file__)), pytest.param(2, marks=pytest.mark.ci(__file__))]
)
def test_a_lie_in_a_step_ends_the_training_before_its_loss_is_opened(
    liar: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The liar adds 2^63 to its summand of one product of step 1, and goes on with it."""
    told: list[float | None] = []
    honest = proved_truncation.truncate_proved_protocol

    def lying(rt: Runtime, notes: ProductNotes, *args: Any, **kwargs: Any) -> Any:
        if rt.party == liar and rt.epoch == 1 and not lied:
            lied.append(rt.epoch)
            notes.z.view(-1)[0] += -(2**63)
        return honest(rt, notes, *args, **kwargs)

    lied: list[int] = []
    monkeypatch.setattr("uvcc_engine.mpc.products.arithmetic.truncate_proved_protocol", lying)
    with pytest.raises(ProofFailedError, match="step 1"):
        _fit(verify="products", progress=lambda done, steps, loss: told.append(loss))
    assert len(told) == 1


@pytest.mark.parametrize(
    "liar", [0, pytest.param(1, marks=pytest.mark.ci(__file__)), pytest.param(2, marks=pytest.mark.ci(__file__))]
)
def test_a_lie_about_a_bit_ends_the_training_before_its_loss_is_opened(
    liar: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The liar inverts one bit of what it sends for an AND of step 1, and goes on with it."""
    told: list[float | None] = []
    honest = Round.send
    lied: list[int] = []

    def lying(message: Round, peer: int, kind: int, data: torch.Tensor) -> None:
        here = threading.current_thread().name == f"party{liar}"
        if here and told and not lied and message.proved and data.dtype == torch.int64 and data.dim() == 2:
            lied.append(peer)
            data.view(-1)[0] ^= 1
        honest(message, peer, kind, data)

    monkeypatch.setattr(Round, "send", lying)
    with pytest.raises(ProofFailedError, match="step 1"):
        _fit(verify="proofs", progress=lambda done, steps, loss: told.append(loss))
    assert lied
    assert len(told) == 1
