"""The trainer's benchmarks: rounds are fair, rows say what they are held against, nothing is compared with itself."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from uvcc_engine.bench import ab, nsa, train
from uvcc_engine.bench.peers import nsa_peers
from uvcc_engine.bench.work.lm_step import Step, dense
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine import turns
from uvcc_engine.nsa.config import ModelConfig, NSAConfig

CPU = torch.device("cpu")
LITTLE = ModelConfig(
    dim=32, n_layers=1, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, nsa=NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=12)
)


def test_rounds_alternate_who_goes_first() -> None:
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    a, b = turns.in_turn([lambda: measure("a"), lambda: measure("b")], 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert (a, b) == ([1, 4, 5], [2, 3, 6])


def test_a_slow_round_cancels_in_the_ratio() -> None:
    slow = [1.0, 10.0, 2.0, 1.0, 5.0]
    found = turns.ratio([2 * x for x in slow], slow)
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)
    wide = turns.ratio([2.0, 3.0, 1.0, 2.0, 2.0], [1.0] * 5)
    assert wide.low < wide.value == 2.0 < wide.high


def test_what_needs_a_gpu_is_left_out_and_said() -> None:
    said: list[str] = []
    known = (*train.CPU_ROWS, *train.GPU_ROWS)
    assert train.pick("", known, train.GPU_ROWS, False, said.append) == list(train.CPU_ROWS)
    assert said == ["left out without a GPU: m7c_2048_gpu"]
    assert train.pick("", known, train.GPU_ROWS, True, said.append) == list(known)
    with pytest.raises(ConfigError, match="m7c_2048_gpu needs a CUDA device"):
        train.pick("m7c_2048_gpu", known, train.GPU_ROWS, False, said.append)
    with pytest.raises(ConfigError, match="unknown row"):
        train.pick("showcase", known, train.GPU_ROWS, False, said.append)


def test_the_dense_twin_differs_in_attention_alone() -> None:
    case = train.cases("showcase_vs_dense")
    twin = dense(case.cfg)
    assert replace(twin, model=replace(twin.model, attention="nsa")) == case.cfg
    assert (case.cfg.train.seq_len, case.cfg.train.batch_size, case.cfg.runtime.precision) == (128, 8, "fp32")
    m7c = train.cases("m7c_byte_512_vs_dense").cfg
    assert (m7c.model.n_layers, m7c.model.vocab, m7c.train.seq_len) == (12, 256, 512)
    for name, tokens in train.LONG_ROWS.items():
        long = train.cases(name).cfg
        assert (long.model.n_layers, long.model.vocab, long.train.seq_len, long.train.batch_size) == (2, 256, tokens, 1)
    gpu = train.cases("m7c_2048_gpu").cfg
    assert (gpu.model.vocab, gpu.train.seq_len, gpu.runtime.precision) == (50257, 2048, "bf16")


def test_a_row_holds_one_against_the_other() -> None:
    case = train.cases("showcase_vs_dense")
    small = replace(case, cfg=replace(case.cfg, train=replace(case.cfg.train, seq_len=32, batch_size=2)), steps=1)
    found = train.against_dense("showcase_vs_dense", small, CPU, 2, "1_threads")
    assert (found.name, found.metric, found.runs, found.unit) == ("showcase_vs_dense", "1_threads", 2, "tokens/s")
    assert found.value > 0
    assert found.reference
    assert found.ratio
    assert (found.bar, found.met) == (None, None)
    barred = train.against_dense("m7c_byte_512_vs_dense", small, CPU, 1, "1_threads")
    assert barred.reference
    assert barred.bar == 0.85 * barred.reference
    assert barred.met == (barred.value >= barred.bar)
    assert train.against_dense("m7c_byte_512_vs_dense", small, CPU, 1, "2_threads").bar is None
    step = Step(small.cfg, CPU, packed=True)
    assert step.tokens == 64
    assert step.rate(2) > 0


@pytest.mark.ci(__file__)
def test_telling_costs_a_share_of_a_real_trainers_time() -> None:
    assert 0 < train.loading_share(20) < 1


def test_settings_of_a_comparison_are_strict() -> None:
    plain = ab.setting("train_showcase", [])
    changed = ab.setting("train_showcase", ["train.batch_size=4", "NSA_LR=0.5", "path=chunked"])
    assert (changed.cfg.train.batch_size, changed.cfg.train.lr, changed.path) == (4, 0.5, "chunked")
    assert plain != changed
    for given, text in (
        ("train.bach_size=4", "batch_size"),
        ("NSA_USE_SEL_PACK=1", "no effect"),
        ("path=fast", "unknown attention path"),
        ("NSA_LR", "without a value"),
    ):
        with pytest.raises(ConfigError, match=text):
            ab.setting("train_showcase", [given])
    with pytest.raises(ConfigError, match="both sides are the same"):
        ab.main(["train_showcase"])


def test_a_comparison_prints_both_and_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--a", "train.seq_len=32", "--b", "train.seq_len=32", "--b", "path=chunked"]
    assert ab.main(["train_showcase", *small, "--runs", "2", "--steps", "1", "--json"]) == 0
    a, b = json.loads(capsys.readouterr().out)
    assert b["reference"] == a["value"]
    assert b["ratio_low"] <= b["ratio"] <= b["ratio_high"]


def test_peers_that_cannot_be_measured_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for package in ("fla", "native_sparse_attention"):
        monkeypatch.setitem(sys.modules, package, None)
    assert nsa.peers(CPU, 1, said.append) == []
    (text,) = said
    assert text.startswith("peers left out: fla (")
    assert ", xunhaolai (" in text
    monkeypatch.setattr(nsa_peers, "find", lambda cfg: ({"fla": lambda q, k, v: q}, []))
    assert nsa.peers(CPU, 1, said.append) == []
    assert said[-1] == "peers left out: fla (it needs a CUDA device)"


@pytest.mark.parametrize("name", ["attn_fwd_s", "attn_bwd_s", "decode_s"])
def test_attention_rows_are_seconds_against_dense(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(nsa.TOKENS, "s", 96)
    monkeypatch.setattr(nsa, "M7C", LITTLE)
    if name.startswith("decode"):
        found = nsa.decoding(name, CPU, 2)
    else:
        found = nsa.attention(name, LITTLE, CPU, 2)
    assert (found.name, found.unit, found.runs) == (name, "s", 2)
    assert found.value > 0
    assert found.ratio
