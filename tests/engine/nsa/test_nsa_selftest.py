"""The self-test passes here, and fails when attention is wrong."""

from __future__ import annotations

import pytest
import torch

from uvcc_engine.nsa import blocks, decode, selftest
from uvcc_engine.nsa.visibility import forget


@pytest.mark.ci(__file__)
def test_all_quick_checks_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main(["--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("ok ") == len(selftest.QUICK)


def test_a_window_that_shows_the_next_token_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = blocks.window_mask

    def leaky(cfg: object, q_pos: torch.Tensor, *rest: object) -> torch.Tensor:
        return honest(cfg, q_pos + 1, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(blocks, "window_mask", leaky)
    forget()
    try:
        with pytest.raises(AssertionError, match="changed an earlier output"):
            selftest.causality(torch.device("cpu"), 0)
    finally:
        forget()


def test_a_decode_that_forgets_the_block_position_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = decode.rope_tables
    monkeypatch.setattr(decode, "rope_tables", lambda p, *a, **k: honest(p.clamp(max=40), *a, **k))
    with pytest.raises(AssertionError, match="differs from prefill"):
        selftest.prefill_is_decode(torch.device("cpu"), 0)
