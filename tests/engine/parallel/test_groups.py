"""Process groups of a party: sums wrap, groups hold whom they should, a lost rank is named, the mesh fits."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from parallel_kit import run_ranks

from uvcc_engine.contract.errors import ConfigError, PeerLostError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.parallel import own_gpu
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.place import RankAddress, device_slot, has_own_devices
from uvcc_engine.parallel.presence import read_withdrawal, withdraw

Events = list[tuple[str, dict[str, Any]]]


@pytest.mark.parametrize("backend", ["unix", "gloo", "sealed"])
def test_a_world_of_eight_adds_gathers_broadcasts_and_passes_on_along_each_dimension(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UVCC_GROUP_BACKEND", backend)

    def body(groups: PartyGroups, events: Events) -> dict[str, Any]:
        c = groups.place.coord
        found: dict[str, Any] = {"rank": groups.place.rank}
        value = 100 * c.replica + 10 * c.stage + c.tensor
        found["tp"] = groups.tp.sum_(torch.tensor([value])).item()
        found["pp"] = [int(t) for t in groups.pp.gather(torch.tensor(value))]
        names = [name for name, _ in events]
        groups.start_dp()
        groups.start_dp()
        found["late"] = "dp_ready" not in names and [n for n, _ in events].count("dp_ready") == 1
        found["wrap"] = groups.dp.sum_(torch.tensor([2**62 + 5])).item()
        found["slice"] = groups.dp.sum_slices(torch.tensor([value, value + 1]))().tolist()
        found["first"] = groups.dp.broadcast_(torch.tensor([value]), 1).item()
        if c.stage == 0:
            groups.pp.send(torch.tensor([value]), 1, tag=7)()
        else:
            found["sent"] = groups.pp.receive(torch.zeros(1, dtype=torch.int64), 0, tag=7).item()
        found["notes"] = groups.gather(f"n{groups.place.rank}".encode())
        found["backends"] = {groups.backend, *(f["backend"] for n, f in events if n == "group_ready")}
        found["events"] = sorted((n, f["group"]) for n, f in events if "group" in f)
        mesh = groups.mesh
        found["mesh"] = (mesh.mesh_dim_names, mesh["dp", "tp"].size(), mesh.get_local_rank("dp"))
        return found

    for rank, found in enumerate(run_ranks(Topology(2, 2, 2), body, sealed=backend == "sealed")):
        assert not isinstance(found, Exception), found
        r, s, t = rank // 4, rank // 2 % 2, rank % 2
        assert found["rank"] == rank
        assert found["tp"] == 2 * (100 * r + 10 * s) + 1
        assert found["pp"] == [100 * r + t, 100 * r + 10 + t]
        assert found["late"]
        assert found["wrap"] == -(2**63) + 10
        assert found["slice"] == [100 + 20 * s + 2 * t + 2 * r]
        assert found["first"] == 100 + 10 * s + t
        assert found.get("sent", 100 * r + t) == 100 * r + t
        assert found["notes"] == [b"n%d" % k for k in range(8)]
        ready = [("group_ready", g) for g in ("dp", "pp", "tp")]
        waits = [("uid_wait", g) for g, index in (("dp", r), ("pp", s), ("tp", t)) if index]
        assert found["events"] == ready + waits
        assert found["backends"] == ({"unix", "sealed", "unix and sealed"} if backend == "sealed" else {backend})
        assert found["mesh"] == (("dp", "pp", "tp"), 4, r)


def test_one_rank_alone_opens_nothing() -> None:
    groups = PartyGroups.open(RankAddress.of(Coord(0, 1, 0, 0), Topology(), {}), on_event=lambda n, f: None)
    groups.start_dp()
    x = torch.tensor([3])
    assert groups.dp.sum_(x).item() == 3
    assert groups.tp.gather(x) == [x]
    assert groups.gather(b"a") == [b"a"]
    assert groups.backend == ""
    groups.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_rank_that_ends_is_named_by_the_collective_that_missed_it(sealed: bool) -> None:
    def body(groups: PartyGroups, events: Events) -> str:
        if groups.place.rank == 1:
            os._exit(9)
        groups._timeout_s = 3.0  # they have met: what is waited for now never comes
        groups.store.set_timeout(timedelta(seconds=3))
        groups.start_dp()
        return "went on without it"

    found = run_ranks(Topology(2), body, end_gracefully=False, sealed=sealed)
    assert isinstance(found[0], PeerLostError)
    assert "dp" in found[0].what
    assert found[1] is None


@pytest.mark.parametrize(("rank", "sealed"), [(0, False), (0, True), (1, False)])
def test_a_rank_that_nobody_has_heard_is_named_as_not_started_and_not_as_stopped(rank: int, sealed: bool) -> None:
    """Its pod may only be late. That a rank had stopped was said of the first one; of another, not even which."""

    def absent(groups: PartyGroups, events: Events) -> str:
        return "met without it"

    def enter(own: int) -> None:
        if own == rank:
            os._exit(0)

    found = run_ranks(Topology(2), absent, timeout_s=2.0, end_gracefully=False, sealed=sealed, enter=enter)
    error = found[1 - rank]
    assert isinstance(error, PeerLostError)
    said = (
        f"p0r{1 - rank}s0t0 waited 2 s for sister ranks that have not started yet, or cannot be reached: p0r{rank}s0t0"
    )
    assert error.what.startswith(said)
    assert "stopped" not in str(error)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_rank_that_ends_before_the_meeting_is_named_by_all_others_within_seconds(sealed: bool) -> None:
    """Killed on its way to the meeting: who shares its machine sees it, the word at the meeting place reaches all."""

    def absent(groups: PartyGroups, events: Events) -> str:
        return "met without it"

    began = time.monotonic()
    found = run_ranks(Topology(4), absent, timeout_s=300.0, end_gracefully=False, dies=2, sealed=sealed)
    assert time.monotonic() - began < 100.0  # it would wait for 300 s
    assert found.pop(2) is None
    for error in found:
        assert isinstance(error, PeerLostError), error
        assert "rank 2" in error.what
        assert error.party == 0


@pytest.mark.parametrize(
    ("rank", "late", "sealed"),
    [(0, False, False), (1, False, False), (1, True, False), (0, False, True), (1, False, True)],
)
def test_a_rank_that_gives_up_before_the_meeting_tells_the_others_why(rank: int, late: bool, sealed: bool) -> None:
    def absent(groups: PartyGroups, events: Events) -> str:
        return "met without it"

    why = "its input is damaged"
    ranks: dict[str, Any] = {"gives_up": {rank: why}, "late": late, "sealed": sealed}
    found = run_ranks(Topology(3), absent, timeout_s=100.0, end_gracefully=False, **ranks)
    found.pop(rank)
    for error in found:
        assert isinstance(error, PeerLostError), error
        assert f"rank {rank} of P0" in error.what
        assert why in error.what


def test_nobody_is_told_where_there_is_nobody() -> None:
    withdraw({}, "why")
    withdraw({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}, "why")
    withdraw({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "what"}, "why")


def test_the_place_must_fit_the_topology() -> None:
    coord, size = Coord(1, 0, 0, 0), Topology(2)
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}
    assert RankAddress.of(coord, size, env).port == 4711
    with pytest.raises(ConfigError, match="no address"):
        RankAddress.of(coord, size, {})
    with pytest.raises(ConfigError, match="rank 1 of 2"):
        RankAddress.of(coord, size, env | {"RANK": "0"})


def test_no_communicator_holds_a_device_twice() -> None:
    size = Topology(2, 4, 2)
    for capacity in (4, 7, 16):
        for name in ("dp", "pp", "tp"):
            for coord in size.coords():
                place = RankAddress(coord, size)
                ours = [c for c in size.coords() if c.party == coord.party]
                slots = [device_slot(c, capacity, size) for c in ours if size.local_rank(c) in place.members(name)]
                assert len(set(slots)) == len(slots)
        assert has_own_devices(capacity, size)
    assert not has_own_devices(3, size)
    assert {device_slot(c, 16, size) for c in size.coords()} == set(range(16))


def claimed(place: RankAddress, count: int, visible: str = "") -> tuple[str, str]:
    env = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    return own_gpu.claim(place, env, count), env.get("CUDA_VISIBLE_DEVICES", "")


def test_a_rank_sees_its_own_gpu_and_nccl_carries_only_between_different_ones() -> None:
    size = Topology(1, 2, 2)
    ranks = [RankAddress(c, size, "127.0.0.1") for c in size.coords() if c.party == 0]
    assert [claimed(one, 4) for one in ranks] == [("cuda", str(k)) for k in range(4)]
    assert [claimed(one, 4, "6,7,2,3") for one in ranks] == [("cuda", k) for k in "6723"]
    assert [claimed(one, 2) for one in ranks] == [("cuda", k) for k in "0110"]
    assert [claimed(one, 1) for one in ranks] == [("cpu", "0")] * 4
    assert [claimed(one, 0) for one in ranks] == [("cpu", "")] * 4
    assert claimed(RankAddress(Coord(0, 0, 0, 0), Topology()), 8) == ("cpu", "")


def test_replicas_on_other_pods_have_gpus_of_their_own() -> None:
    size = Topology(4, 1, 2)
    ranks = [RankAddress(c, size, "10.0.0.7") for c in size.coords() if c.party == 0]
    assert [claimed(one, 2) for one in ranks] == [("cuda", "0"), ("cuda", "1")] * 4
    here = [RankAddress(c, size, "127.0.0.1") for c in size.coords() if c.party == 0]
    assert {claimed(one, 2)[0] for one in here} == {"cpu"}, "all four replicas are on this machine"


def test_a_word_is_read_before_its_place_may_close() -> None:
    """The place closes as soon as all have heard: whoever says so first could find nobody to read from."""

    class ClosesOnceHeard:
        heard = False

        def check(self, keys: list[str]) -> bool:
            return True

        def get(self, key: str) -> bytes:
            if self.heard:
                raise RuntimeError("Failed to recv, got 0 bytes")
            return b"0 its input is damaged"

        def set(self, key: str, value: str) -> None:
            self.heard = True
            raise RuntimeError("Broken pipe")

    told = read_withdrawal(ClosesOnceHeard(), 2, 0)
    assert told is not None
    assert "rank 0 of P0" in told.what
    assert "its input is damaged" in told.what
