"""Gradient sums over the replicas start when the last microbatch has reached a weight, not when all weights have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from parallel_kit import run_ranks
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.parallel.group import Communicator
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.sharding.gradients import Gradients
from uvcc_engine.sharding.stage_passes import Plain


@dataclass
class Replicas(Communicator):
    """Two replicas of which the other one has the same gradients; notes what is started and waited for."""

    notes: list[str]

    def __post_init__(self) -> None:
        super().__init__("dp", [0, 1], 0)

    def sum_slices(self, x: Tensor) -> Callable[[], Tensor]:
        self.notes.append(f"starts {x.tolist()}")

        def finish() -> Tensor:
            self.notes.append("waits")
            return 2 * x[: len(x) // 2]

        return finish


@dataclass
class Sisters:
    """What ``Gradients`` sees of a party's groups."""

    started: bool
    notes: list[str] = field(default_factory=list)
    tp: Communicator = field(default_factory=lambda: Communicator("tp", [0], 0))
    place: RankAddress = field(default_factory=lambda: RankAddress(Coord(0, 0, 0, 0), Topology(2), "127.0.0.1", 1))

    def __post_init__(self) -> None:
        self.dp_started = self.started
        self.dp = Replicas(self.notes)

    def start_dp(self) -> None:
        if not self.dp_started:
            self.notes.append("dp comes up")
        self.dp_started = True


def parts() -> tuple[Any, Any]:
    return Plain(), Plain()


def gradients(groups: Sisters, *slots: Any, bucket: int = 1) -> Gradients:
    return Gradients([(part, 0) for part in slots], groups, bucket=bucket)  # type: ignore[arg-type]


def test_a_sum_starts_while_the_layers_below_are_still_at_work() -> None:
    low, high = parts()
    groups = Sisters(started=True)
    sums = gradients(groups, low, high)
    sums.begin(2)
    sums.take(high, 0, torch.tensor([1, 2]))
    assert groups.notes == []
    sums.take(high, 0, torch.tensor([10, 20]))
    assert groups.notes == ["starts [11, 22]"]  # nothing of the lower weight has come yet
    sums.take(low, 0, torch.tensor([5, 6, 7]))
    sums.take(low, 0, torch.tensor([5, 6, 7]))
    assert groups.notes == ["starts [11, 22]", "starts [10, 12, 14, 0]"]
    assert [s.tolist() for s in sums.slices()] == [[20, 24], [22]]
    assert groups.notes[2:] == ["waits", "waits"]


def test_the_group_comes_up_after_the_first_backward_pass() -> None:
    low, high = parts()
    groups = Sisters(started=False)
    sums = gradients(groups, low, high)
    for part in (high, low):
        sums.take(part, 0, torch.tensor([1, 1]))
    assert groups.notes == []
    sums.slices()
    assert groups.notes == ["dp comes up", "starts [1, 1]", "starts [1, 1]", "waits", "waits"]


def test_small_weights_travel_together() -> None:
    low, high = parts()
    groups = Sisters(started=True)
    sums = gradients(groups, low, high, bucket=1 << 20)
    sums.take(high, 0, torch.tensor([1, 2]))
    sums.take(low, 0, torch.tensor([[3, 4], [5, 6]]))
    assert groups.notes == ["starts [1, 3, 4, 2, 5, 6]"]
    assert [s.tolist() for s in sums.slices()] == [[6, 8], [2]]
    assert sums.mine(0, torch.tensor([[3, 4], [5, 6]])).tolist() == [3, 4]


def test_a_weight_without_a_gradient_is_an_error() -> None:
    low, high = parts()
    sums = gradients(Sisters(started=True), low, high)
    sums.take(high, 0, torch.tensor([1, 2]))
    with pytest.raises(ProtocolError, match="1 weights had no gradient"):
        sums.slices()


def test_slices_of_replicas_and_tensor_ranks_come_together_again() -> None:
    def body(groups: PartyGroups, events: Any) -> Any:
        split, whole = parts()
        whole.shared = True
        sums = Gradients([(split, 0), (whole, 0)], groups)
        c = groups.place.coord
        sums.take(whole, 0, torch.arange(5) + 100 * c.tensor)
        sums.take(split, 0, torch.arange(3) + 10 * c.tensor)
        got = [Share(s, -s, 16) for s in sums.slices()]
        like = [Share(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 16)]
        like += [Share(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64), 16)]
        return [(s.first.tolist(), s.second.tolist()) for s in sums.joined(got, like)]

    for rank, found in enumerate(run_ranks(Topology(2, 1, 2), body)):
        mine = [2 * (k + 10 * (rank % 2)) for k in range(3)]  # over two replicas
        every = [4 * k + 200 for k in range(5)]  # over two replicas and both tensor ranks
        assert found == [(mine, [-v for v in mine]), ([every], [[-v for v in every]])], rank
