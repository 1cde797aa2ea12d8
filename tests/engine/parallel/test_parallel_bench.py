"""The parallel benchmark reads the pipeline's ticks as the textbook draws them, and measures a real fleet."""

from __future__ import annotations

import pytest
from warm_kit import WarmForker

from uvcc_engine.bench import parallel
from uvcc_engine.bench.parallel import bubble, init_rows
from uvcc_engine.bench.scenarios import whole_scale
from uvcc_engine.bench.scenarios.whole_scale import phase6_rows
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.parallel.schedule import one_f_one_b


def drawn(stages: int, microbatches: int) -> list[list[dict[str, object]]]:
    """1F1B with passes of one second each, every one as early as its order and its neighbour's pass allow."""
    ends: dict[tuple[int, str, int], float] = {}
    orders = [list(one_f_one_b(s, stages, microbatches)) for s in range(stages)]
    free, at = [0.0] * stages, [0] * stages
    ticks: list[list[dict[str, object]]] = [[] for _ in range(stages)]
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            if at[s] == len(orders[s]):
                continue
            phase, m = orders[s][at[s]]
            before = (s - 1 if phase == "F" else s + 1, phase, m)
            if 0 <= before[0] < stages and before not in ends:
                continue
            start = max(free[s], ends.get(before, 0.0))
            free[s] = ends[s, phase, m] = start + 1.0
            ticks[s].append({"phase": phase, "start": start, "end": start + 1.0})
            at[s] += 1
    return ticks


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 32), (2, 3), (4, 4)])
def test_an_even_schedule_loses_what_the_textbook_says(stages: int, microbatches: int) -> None:
    ticks = drawn(stages, microbatches)
    assert bubble(ticks) == pytest.approx((stages - 1) / (microbatches + stages - 1))
    for stage in ticks:
        stage.append({"phase": "U", "start": 1e6, "end": 2e6})  # the update is no part of it
    assert bubble(ticks) == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.fixture
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's fleets are forked from the session's process, which has imported everything."""
    for module in (parallel, whole_scale):
        monkeypatch.setattr(module, "Forker", WarmForker)


@pytest.mark.usefixtures("_warm")
def test_groups_of_a_real_fleet_are_timed() -> None:
    rows = {r.name: r for r in init_rows(1, Topology(2, 2, 1, 2))}
    assert set(rows) == {"dp_init_p50", "pp_init_p50"}
    assert all(0 < r.value < r.max + 1e-9 and r.ratio for r in rows.values())


@pytest.mark.usefixtures("_warm")
@pytest.mark.ci(__file__)
def test_the_scale_run_counts_roots_and_opens_of_every_worker_twice() -> None:
    rows = {r.name: r for r in phase6_rows(2, Topology(1, 1, 2, 2))}
    assert {name: rows[f"phase6_6_{name}"].value for name in ("roots", "forward_opens", "backward_opens")} == {
        "roots": 1.0,
        "forward_opens": 1.0,
        "backward_opens": 1.0,
    }
    assert rows["phase6_6_timeouts"].value == rows["phase6_6_aborts"].value == 0
    assert 6 << 20 < rows["phase6_6_memory"].value < 6 << 30
    assert rows["phase6_6"].runs == 2
