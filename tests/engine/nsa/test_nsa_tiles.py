"""Which tiles a kernel takes: what was measured on a GPU of that kind, and a default that fits every other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from uvcc_engine.bench import nsa as nsa_bench
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.nsa import flex
from uvcc_engine.nsa.kernels import tiles
from uvcc_engine.nsa.kernels.tiles import Tiles

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports it
pytest.importorskip("triton")

from uvcc_engine.bench.timing import nsa_tiles
from uvcc_engine.nsa.kernels import gather


@pytest.fixture(autouse=True)
def _chooses_by_itself() -> Iterator[None]:
    yield
    for kernel in tiles.KERNELS:
        tiles.force(kernel, None)


def test_what_ships_was_a_candidate_of_the_measurement() -> None:
    assert set(nsa_tiles.GRID) == set(tiles.KERNELS)
    found = tiles.measured()
    assert "9.0" in found
    for winners in found.values():
        assert set(winners) == set(tiles.KERNELS)
        for kernel, winner in winners.items():
            assert replace(winner, tma=False, edges=False) in nsa_tiles.GRID[kernel]
            assert {winner.rows, winner.keys} <= {16, 32, 64, 128}


def test_winners_are_for_narrow_heads_of_16_bits_on_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        device = torch.device("cuda", 0)

        def __init__(self, bytes_each: int, width: int) -> None:
            self.shape, self._bytes = (1, 8, 2, width), bytes_each

        def element_size(self) -> int:
            return self._bytes

    def found(capability: tuple[int, int], bytes_each: int = 2, width: int = 64) -> Tiles:
        tiles.winners_of.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return tiles.tiles_for("selection.slots", OnGpu(bytes_each, width))  # type: ignore[arg-type]

    winner = tiles.measured()["9.0"]["selection.slots"]
    assert winner != Tiles()
    assert found((9, 0)) == winner
    assert found((8, 0)) == found((9, 0), bytes_each=4) == found((9, 0), width=128) == Tiles()
    assert tiles.tiles_for("band.forward", OnGpu(4, 64)) == Tiles(32, 32, warps=8, stages=1)  # type: ignore[arg-type]
    assert tiles.tiles_for("decode.split", OnGpu(4, 128)) == Tiles(16, 16, warps=8, stages=1)  # type: ignore[arg-type]
    assert tiles.tiles_for("selection.forward", OnGpu(4, 64)).rows == 16  # type: ignore[arg-type]
    assert tiles.tiles_for("selection.slots", torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)) == Tiles()
    tiles.force("selection.slots", Tiles(rows=32))
    assert found((9, 0)) == Tiles(rows=32)
    tiles.winners_of.cache_clear()


def test_small_tiles_leave_no_more_parts_than_those_of_16_bits() -> None:
    chosen = torch.randint(0, 8, (1, 2, 512, 4), dtype=torch.int32)
    usual, small = (
        gather.segments(chosen, 8, 6, one)[0].n_chunks
        for one in (Tiles(), tiles.of_single_products("selection.forward", 64))
    )
    assert small <= 1.3 * usual  # a tile of 16 rows has two queries of six heads, one of 64 ten


class Timed:
    """Stands for the GPU of a tuning: a kernel's forms take the milliseconds that the test gives them."""

    def __init__(self, milliseconds: dict[tuple[bool, bool], float]) -> None:
        self._milliseconds = milliseconds
        self.tried: set[tuple[bool, bool]] = set()

    def milliseconds(self, backward: bool) -> float:
        now = tiles.forced("band.forward")
        assert now is not None
        self.tried.add((now.tma, now.edges))
        return self._milliseconds[now.tma, now.edges] + 0.01 * now.warps


@pytest.mark.parametrize(
    ("capability", "milliseconds", "won"),
    [
        ((9, 0), {(False, False): 2.0, (True, False): 1.0, (False, True): 3.0, (True, True): 1.5}, (True, False)),
        ((9, 0), {(False, False): 1.0, (True, False): 2.0, (False, True): 3.0, (True, True): 2.0}, (False, False)),
        ((8, 0), {(False, False): 2.0, (False, True): 1.0}, (False, True)),  # which has no such unit
    ],
)
def test_descriptors_and_other_masks_are_taken_where_they_were_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    milliseconds: dict[tuple[bool, bool], float],
    won: tuple[bool, bool],
) -> None:
    work = Timed(milliseconds)
    monkeypatch.setattr(nsa_tiles, "TimedBranches", lambda tokens, device: work)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = nsa_tiles.tune(["band.forward"], 64, torch.device("cuda"), lambda said: None)
    winner = found[f"{capability[0]}.{capability[1]}"]["band.forward"]
    assert (winner["tma"], winner["edges"]) == won
    assert work.tried == set(milliseconds)
    assert Tiles(**winner).warps == 4
    assert not Tiles().tma
    assert not Tiles().edges


def test_tuning_needs_a_gpu_and_known_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--tune needs a GPU"):
        nsa_bench.main(["--tune"])
    assert nsa_tiles.chosen("topk,band.forward") == ["topk", "band.forward"]
    with pytest.raises(ConfigError, match="unknown kernel 'band'"):
        nsa_tiles.chosen("band")


def test_flex_attention_compiles_more_forms_than_torch_allows_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the limit torch goes on without fusing: seen on an H200, where it asked for 24 GB of scores."""
    from torch._dynamo import config

    monkeypatch.setattr(config, "recompile_limit", 8)
    flex.compiled.cache_clear()
    flex.compiled()
    assert config.recompile_limit >= flex.MOST_KERNELS
    flex.compiled.cache_clear()
