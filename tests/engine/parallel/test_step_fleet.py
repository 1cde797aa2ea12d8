"""A step of parties with several workers is foretold: its counts are those that the real workers tell of themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from uvcc_engine.bench.launch.fleet import Fleet, Forker
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.simulate import step_rehearsal
from uvcc_engine.simulate.message_chain import PASSED, READ, SENT, TAKEN, Happening, longest_chain
from uvcc_engine.simulate.step_fleet import ALONE, MOST_WORKERS, busiest, fleet_costs, rehearsed_size
from uvcc_engine.simulate.step_worker import WorkerSteps

SIZE = Topology(2, 2, 1, 2)
JOB = PrivateJob(steps=3, batch=8, checkpoint_every=2, test_rows=40, schedule="constant")
"""With a rate that falls, a step whose rate is a power of two takes a truncation less."""
TIED = [{"tied": [{"embedding": {"vocabulary": 27, "width": 4}}, {"residual": [{"linear": 4}, "relu"]}]}]
LETTERS = PrivateJob.from_json(
    {"model": model_to_json(model_of_list(TIED, 4 * 27, 27, 4)), "steps": 3, "batch": 4, "test_rows": 8, "lr": 0.5}
    | {"schedule": "constant", "momentum": 0.9, "verify": "proofs", "reveal": ["loss"]}
)


def told(fleet: Fleet) -> tuple[float, float]:
    """Rounds of the worker that has most, and bytes of all workers, as a plan is scored by them."""
    beats = []
    for c in fleet.coords:
        path = fleet.dir(c) / files.heartbeat_name(fleet.size.local_rank(c))
        beats.append(json.loads(path.read_text().splitlines()[-1]))
    return max(beat["step_rounds"] for beat in beats), sum(beat["step_bytes"] for beat in beats)


def foretold(job: PrivateJob, size: Topology, *, apart: bool = False) -> dict[str, float]:
    part = rehearsed_size(fit_model(job), size, apart=apart)
    found = step_rehearsal.told(job, size, part, "direct", 2)
    return {name: float(value) for name, value in found["fleet"].items()}


@pytest.mark.ci(__file__)
def test_stages_and_replicas_and_microbatches_take_what_was_foretold(whole: Fleet) -> None:
    rounds, sent = told(whole)
    said = foretold(JOB, SIZE)
    assert said["rounds"] == rounds
    assert said["bytes"] == pytest.approx(sent, abs=1)
    assert said["pod_bytes"] == pytest.approx(said["bytes"] / 6)
    alone = step_rehearsal.rehearse(JOB, 2)
    assert abs(6 * alone.bytes_sent / sent - 1.0) > 0.05  # one worker's, which a plan once multiplied
    few = foretold(JOB, SIZE, apart=True)  # of one replica, the other's are reckoned
    assert (few["rounds"], few["chain"]) == (said["rounds"], said["chain"])
    assert few["bytes"] == pytest.approx(said["bytes"], rel=1e-3)


FEW = PrivateJob.from_json(
    {"model": model_to_json(model_of_list([{"linear": 4}, "relu", "linear"], 4, 1)), "objective": "binary"}
    | {"steps": 3, "batch": 8, "test_rows": 16, "schedule": "constant", "reveal": ["loss"]}
)


@pytest.mark.parametrize(
    ("job", "size"),
    [
        pytest.param(FEW, Topology(1, 2, 1, 2), id="stages and microbatches"),
        pytest.param(
            replace(JOB, optimizer="adam", clip_norm=1.0, momentum=0.0),
            Topology(1, 2, 2, 1),
            id="tensor ranks in stages",
            marks=pytest.mark.ci(__file__),
        ),
        pytest.param(LETTERS, Topology(1, 2, 1, 2), id="a proved tied table", marks=pytest.mark.ci(__file__)),
        pytest.param(
            replace(JOB, model="cnn-digits"), Topology(2, 1, 1, 1), id="replicas", marks=pytest.mark.ci(__file__)
        ),
    ],
)
def test_every_way_to_share_out_a_step_is_foretold(
    job: PrivateJob, size: Topology, forker: Forker, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path / "fleet", forker, job, size, data=rows_of(4, 1) if job is FEW else None)
    fleet.launch()
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    rounds, sent = told(fleet)
    said = foretold(job, size)
    assert said["rounds"] == rounds
    # under Adam what is truncated is wider in some steps than in others, and a forecast is of the steps it rehearsed
    share = 2e-3 if job.optimizer == "adam" else 0.0
    assert said["bytes"] == pytest.approx(sent, rel=share, abs=1)


def rows_of(columns: int, classes: int) -> Dataset:
    """49 rows to train on, of bits where there are classes."""
    rng = np.random.default_rng(6)
    x = rng.integers(0, 2, (65, columns)).astype(np.float64) if classes else rng.normal(size=(65, columns))
    y = (x[:, 0] * x[:, 1] > 0.5).astype(np.float64) if classes else x[:, :0]
    return Dataset(x[16:], y[16:], x[:16], y[:16], classes)


SUMMED = {"steps": 3, "momentum": 0.0, "schedule": "constant", "lr": 0.5, "test_rows": 16, "min_rows": 2}
CLUSTERS = PrivateJob.from_json(
    {"model": model_to_json(model_of_list([{"kmeans": 3}], 4, 0)), "objective": "inertia", "batch": 24}
    | SUMMED
    | {"reveal": ["loss", "inertia"]}
)


def trees(batch: int, verify: str = "off") -> PrivateJob:
    model = model_to_json(model_of_list([{"trees": {"count": 3, "depth": 2}}], 5, 1))
    told = {"objective": "binary", "reveal": ["loss", "accuracy"], "batch": batch, "verify": verify}
    return PrivateJob.from_json({"model": model} | SUMMED | told)


@pytest.mark.ci(__file__)
@pytest.mark.parametrize(
    ("job", "replicas", "known"),
    [(trees(24), 2, 49), (trees(12), 2, 49), (trees(20), 1, 49), (CLUSTERS, 2, 0)],
    ids=["trees of all rows but one", "trees of half the rows", "one worker's trees of some rows", "k-means"],
)
def test_trees_and_k_means_are_foretold_on_replicas(
    job: PrivateJob, replicas: int, known: int, forker: Forker, tmp_path: Path
) -> None:
    size = Topology(replicas)
    fleet = Fleet(tmp_path / "fleet", forker, job, size, data=rows_of(5 if known else 4, int(known > 0)))
    fleet.launch()
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    rounds, sent = told(fleet)
    part = rehearsed_size(fit_model(job), size, apart=False)
    found = step_rehearsal.told(job, size, part, "direct", 3, known)
    said = found.get("fleet", {"rounds": found["rounds"], "bytes": 3 * found["bytes"]})
    assert said["rounds"] == rounds
    assert said["bytes"] == pytest.approx(sent, rel=5e-3)  # a batch over two passes may draw a row twice
    if job.batch == 24:
        assert 3 * replicas * step_rehearsal.rehearse(job, 2).bytes_sent > 1.01 * sent  # as a plan once multiplied


def test_the_party_that_sends_most_is_told_by_what_it_sends() -> None:
    def sent(*by_step: int) -> WorkerSteps:
        return WorkerSteps(bytes_sent=list(by_step))

    alone = {Coord(0, p, 0, 0): sent(10**9, each, each) for p, each in enumerate((360, 350, 2600))}
    assert busiest(alone) == pytest.approx(3 * 2600 / (360 + 350 + 2600))  # without the first step, which also meets
    two = {Coord(r, p, 0, 0): sent(0, 100 * (1 + (p == r))) for r in range(2) for p in range(3)}
    assert busiest(two) == pytest.approx(6 * 200 / 800)  # each replica's pods have lines of their own
    assert busiest({Coord(0, p, 0, 0): sent(0) for p in range(3)}) == 1.0


# -- which workers are rehearsed --------------------------------------------------------------------------------------


def test_as_many_replicas_are_rehearsed_as_a_machine_takes() -> None:
    mlp = find_model("mlp-digits")
    trees = model_of_list([{"trees": {"count": 1, "depth": 1}}], 4, 2)
    cases = [
        (mlp, ALONE, False, ALONE),
        (mlp, Topology(4, 2, 1, 2), False, Topology(4, 2, 1, 2)),
        (mlp, Topology(64, 2, 2, 4), False, Topology(2, 2, 2, 4)),
        (mlp, Topology(64, 2, 2, 4), True, Topology(1, 2, 2, 4)),
        (mlp, Topology(64, 1, 1, 1), True, Topology(2, 1, 1, 1)),  # of one alone, another program would train
        (mlp, Topology(1, 8, 2, 8), False, None),
        (trees, Topology(8, 1, 1, 1), True, Topology(8, 1, 1, 1)),
        (trees, Topology(9, 1, 1, 1), False, None),
    ]
    for model, size, apart, part in cases:
        assert rehearsed_size(model, size, apart=apart) == part
        assert part is None or part.workers <= MOST_WORKERS


def test_the_manual_says_how_many_workers_are_rehearsed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tutorials" / "own-table.md").read_text()
    assert f"up to {MOST_WORKERS} of the three parties" in page
    assert f"where one replica has more than {MOST_WORKERS}, counts are not foretold" in page


def test_the_passes_of_more_replicas_are_added_and_their_update_is_divided() -> None:
    steps = WorkerSteps(rounds=[9, 9], bytes_sent=[100, 100], main_bytes=[10, 10])
    size, part = Topology(8, 2, 1, 2), Topology(2, 2, 1, 2)
    workers = dict.fromkeys(part.coords(), steps)

    def mean(costs: object) -> tuple[float, float]:
        return tuple(np.mean(costs, axis=0))  # type: ignore[call-overload, no-any-return]

    found = fleet_costs(JOB, size, part, workers, mean)
    assert (found.rounds, found.chain) == (9.0, 0)
    assert found.bytes == 12 * (4 * 90 + 10)
    proved = fleet_costs(replace(JOB, verify="proofs"), size, part, workers, mean)
    assert proved.bytes == 12 * 4 * 100


# -- the longest chain ------------------------------------------------------------------------------------------------

ONE, OTHER = Coord(0, 0, 0, 0), Coord(0, 1, 0, 0)
NEXT, NEXT_OTHER = Coord(0, 0, 1, 0), Coord(0, 1, 1, 0)
FORTH, BACK, LENT = 1, 0, 1 << 32


def ping(stream: int, number: int, rounds: int, to: int) -> list[Happening]:
    """So many rounds of a pair, each of which sends and reads."""
    numbers = range(number, number + rounds)
    return [one for n in numbers for one in ((SENT, stream, to, n), (READ, stream, to, n))]


def test_rounds_of_one_pass_follow_one_another_and_those_of_two_do_not() -> None:
    both = [ping(1, 0, 3, 1) + ping(3, 0, 2, 1), ping(1, 0, 3, 0) + ping(3, 0, 2, 0)]
    assert longest_chain(dict(zip((ONE, OTHER), both, strict=True))) == 3
    update = [(both[0] + ping(0, 0, 2, 1)), (both[1] + ping(0, 0, 2, 0))]
    assert longest_chain(dict(zip((ONE, OTHER), update, strict=True))) == 5  # it waits for all passes
    back = [ping(1, 0, 3, 1) + ping(2, 0, 2, 1), ping(1, 0, 3, 0) + ping(2, 0, 2, 0)]
    assert longest_chain(dict(zip((ONE, OTHER), back, strict=True))) == 5  # back after forth
    one_way: dict[Coord, list[Happening]] = {ONE: [(SENT, 0, 1, n) for n in range(9)], OTHER: []}
    assert longest_chain(one_way) == 0  # nobody waits


def test_a_stage_goes_on_where_the_one_before_it_ended() -> None:
    first = [*ping(1, 0, 3, 1), (PASSED, 1, FORTH, 0), (TAKEN, 2, BACK, 0), *ping(2, 0, 1, 1)]
    last = [(TAKEN, 1, FORTH, 0), *ping(1, 0, 4, 1), *ping(2, 0, 2, 1), (PASSED, 2, BACK, 0)]

    def mirrored(trace: list[Happening]) -> list[Happening]:
        return [(what, stream, 0 if what in (SENT, READ) else other, n) for what, stream, other, n in trace]

    traces = {ONE: first, OTHER: mirrored(first), NEXT: last, NEXT_OTHER: mirrored(last)}
    assert longest_chain(traces) == 3 + 4 + 2 + 1
    lending = {c: [(PASSED, 0, FORTH, LENT), *trace] for c, trace in traces.items() if c.stage == 0}
    lent = {c: [(TAKEN, 0, FORTH, LENT), *trace] for c, trace in traces.items() if c.stage == 1}
    assert longest_chain(lending | lent) == 10
