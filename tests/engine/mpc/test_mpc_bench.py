"""The benchmark measures what it says: the training step is right, delays are real, rows have their shape."""

from __future__ import annotations

import itertools
import json
import struct
import time
from typing import Any

import pytest
import torch

from uvcc_engine.bench import _mpc_party as party_side
from uvcc_engine.bench import mpc as bench
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.local import LocalPlanes
from uvcc_engine.mpc.opening import open_many
from uvcc_engine.mpc.runtime import Runtime
from uvcc_engine.mpc.share import reconstruct
from uvcc_engine.plane.api import Tag


def test_the_benchmarked_step_is_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(party_side, "BATCH", 16)
    sizes = (20, 12, 11, 10)

    def inputs(party: int) -> tuple[Any, Any, list[Any]]:
        x, y = party_side.normal(party, 16, 20), party_side.normal(party, 16, 10, scale=0.1)
        weights = [party_side.normal(party, a, b, scale=0.3) for a, b in itertools.pairwise(sizes)]
        return x, y, weights

    def body(rt: Runtime) -> list[torch.Tensor]:
        return open_many(rt, rt.run(party_side.mlp_step_protocol(rt, *inputs(rt.party))))

    found = LocalPlanes().run_three(body)[0]
    all_inputs = [inputs(p) for p in range(3)]
    x, y = (reconstruct([i[k] for i in all_inputs]) for k in (0, 1))
    weights = [reconstruct([i[2][k] for i in all_inputs]).requires_grad_() for k in range(3)]
    hidden = ((x @ weights[0]).relu() @ weights[1]).relu()
    logits = hidden @ weights[2]
    gradient = (logits.softmax(-1) - y).detach()
    logits.backward(gradient)
    for got, w in zip(found, weights, strict=True):
        assert (got - (w - 0.125 / 16 * w.grad)).abs().max() < 2e-4


def test_every_row_has_its_work() -> None:
    assert set(party_side.works(0)) == set(bench.ROWS)


def test_a_delayed_plane_delivers_late() -> None:
    three = LocalPlanes()
    sender, receiver = (party_side.DelayedPlane(three.planes[p], 0.05) for p in (0, 1))
    tag = Tag(0, 0, 0, 1)
    begun = time.monotonic()
    sender.send(1, tag, b"payload")
    assert bytes(receiver.recv(0, tag)) == b"payload"
    assert time.monotonic() - begun >= 0.05
    sender.send(1, tag, b"x")
    inner = three.planes[1].recv(0, tag)
    assert struct.unpack("<d", inner[:8])[0] >= begun


def test_rows_take_the_slowest_party_and_the_median_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [
        {"matmul_512": {"seconds": [1.0, 2.0, 9.0], "floors": [0.5] * 3, "rounds": 2, "bytes": 30 * p}}
        for p in range(3)
    ]
    measured[1]["matmul_512"]["seconds"] = [3.0, 1.0, 1.0]
    monkeypatch.setattr(bench, "run_parties", lambda rows, runs: measured)
    assert bench.main(["--rows", "matmul_512", "--json"]) == 0
    seconds, sent, rounds = json.loads(capsys.readouterr().out)
    assert (seconds["metric"], seconds["value"], seconds["min"], seconds["max"]) == ("seconds", 3.0, 2.0, 9.0)
    assert (seconds["reference"], seconds["ratio"], seconds["runs"]) == (0.5, 6.0, 3)
    assert (sent["metric"], sent["value"], sent["unit"]) == ("bytes_per_party", 30.0, "B")
    assert (rounds["metric"], rounds["value"]) == ("rounds", 2.0)
    assert bench.main(["--rows", "matmul_512"]) == 0
    assert "6.00 x local arithmetic" in capsys.readouterr().out


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="matmul_7"):
        bench.main(["--rows", "matmul_7"])
