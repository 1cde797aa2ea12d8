"""Columns standardised by statistics that nobody sees: against the same in clear, and what of it can ever be opened."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.fitting_pass import FittingPass
from uvcc_engine.data.schema import load_schema
from uvcc_engine.data.sets import Dataset
from uvcc_engine.data.table_batches import table_batches
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.model.learning.standardising import ClearStatistics, Standardiser, named
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct, share_of, split
from uvcc_engine.owner.rows import rows_of
from uvcc_engine.sealing.inputs import PartyInputs, check_units, dataset_tensors
from uvcc_engine.sharding.validation import check_statistics, fit_model

torch.set_num_threads(1)
SCALES = np.array([0.2, 1.0, 15.0, 40.0, 0.0])
ROUNDS = 17
SHIFTS = np.array([0.0, -3.0, 60.0, -20.0, 5.0])


def two_owners(rows: int = 240) -> np.ndarray:
    """Rows of two owners whose columns lie elsewhere: neither's own statistics are those of all rows."""
    rng = np.random.default_rng(19)
    first, second = rng.normal(size=(rows, 5)), rng.normal(size=(rows // 2, 5)) * 1.5 + 0.5
    x = np.concatenate([first, second]) * SCALES + SHIFTS
    return np.clip(x, -127, 127)


def shared(x: np.ndarray) -> list[Share]:
    rng = np.random.default_rng(5)
    parts = split(torch.from_numpy(x), 16, lambda n: rng.bytes(n))
    return [share_of(parts, p) for p in range(3)]


def job(**changes: Any) -> PrivateJob:
    model = model_to_json(model_of_list([{"linear": 8}, "relu", "linear"], 5, 2))
    told = {"model": model, "steps": 6, "batch": 32, "lr": 0.3, "test_rows": 60, "standardise": True}
    return PrivateJob.from_json({**told, **changes})


def data() -> Dataset:
    x = two_owners()
    score = (x - x.mean(0)) / np.maximum(x.std(0), 1e-9)
    y = (score[:, 0] + score[:, 2] > score[:, 3]).astype(np.int64)
    order = np.random.default_rng(1).permutation(len(x))
    x, y = x[order], y[order]
    return Dataset(x[60:], y[60:], x[:60], y[:60], 2)


def of_party(p: int) -> PartyInputs:
    tensors = {}
    rng = np.random.default_rng(7)
    for name, ring in dataset_tensors(data(), 16).items():
        a, b = (rng.integers(-(2**63), 2**63, ring.shape) for _ in range(2))
        with np.errstate(over="ignore"):
            three = (a, b, ring - a - b)
        tensors[name] = (three[p], three[(p + 1) % 3])
    return PartyInputs(p, 16, tensors)


@pytest.mark.parametrize("rows", [20, 360, 6000])
def test_statistics_of_all_owners_rows_are_those_in_clear(rows: int) -> None:
    x = two_owners(rows)
    mine = shared(x)

    def body(rt: Runtime) -> tuple[Standardiser, Share]:
        found = Standardiser(rt, 5, 16)
        rt.run(found.fit_protocol(mine[rt.party]))
        assert rt.rounds == ROUNDS
        return found, rt.run(found.apply_protocol(mine[rt.party]))

    got = LocalPlanes(3).run_three(body)
    mean, inverse = (reconstruct([s.statistics[i] for s, _ in got]).numpy().reshape(-1) for i in range(2))
    clear = ClearStatistics.of(x)
    assert np.abs(mean - clear.mean).max() < 2e-3
    assert np.abs(inverse / clear.inverse - 1.0).max() < 5e-3
    scaled = reconstruct([y for _, y in got]).numpy()
    assert np.abs(scaled - clear.apply(x)).max() < 0.02
    assert np.abs(scaled[:, 4]).max() < 0.02  # a column that says nothing stays nothing


def test_messages_do_not_depend_on_how_many_rows_there_are() -> None:
    def sizes(rows: int) -> list[tuple[int, int, int, int]]:
        planes, mine = LocalPlanes(3, keep=True), shared(two_owners(rows))
        planes.run_three(lambda rt: rt.run(Standardiser(rt, 5, 16).fit_protocol(mine[rt.party])))
        came = planes.wire.received.items()
        return sorted((to, src, tag.kind, len(body)) for to, all_ in came for src, tag, body in all_)

    assert sizes(40) == sizes(128) == sizes(2000)


def test_rows_that_the_sums_have_no_room_for_are_refused() -> None:
    shapes = {"train_x": (15, 5), "train_y": (15, 2), "test_x": (9, 5), "test_y": (9, 2)}
    with pytest.raises(ConfigError, match=r"job\.standardise over 15 rows"):
        check_statistics(shapes, job())
    many = {name: (2**18 + 1, width) for name, (_, width) in shapes.items()}
    with pytest.raises(ConfigError, match=r"job\.standardise over 262145 rows"):
        check_statistics(many, job())
    few = job(reveal=["weights", "statistics"], min_rows=100)
    with pytest.raises(ConfigError, match="statistics of 20 rows would be revealed"):
        check_statistics({n: (20, w) for n, (_, w) in shapes.items()}, few)


def trained(job: PrivateJob, steps: range, state: list[Any] | None = None, inputs: Any = of_party) -> list[Any]:
    def body(rt: Runtime) -> tuple[PrivateTrainer, list[float]]:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs(rt.party))
        if state is not None:
            trainer.load_state(state[rt.party])
        losses = []
        for step in steps:
            rt.begin_epoch(step)
            loss = trainer.step(step).loss
            losses += [] if loss is None else [loss]
        return trainer, losses

    return LocalPlanes(2).run_three(body)


def test_training_follows_the_reference_and_goes_on_from_its_state_in_the_same_bits() -> None:
    j = job(reveal=["loss", "accuracy", "weights", "statistics"])
    whole = trained(j, range(j.steps))
    clear = train_plaintext(j, data())
    assert np.allclose(whole[0][1], clear.losses, atol=2e-2)
    assert clear.losses[-1] < 0.9 * clear.losses[0]
    assert not np.allclose(whole[0][1], train_plaintext(replace(j, standardise=False, reveal=("loss",)), data()).losses)
    halted = trained(j, range(3))
    resumed = trained(j, range(3, j.steps), [t.state() for t, _ in halted])
    for (one, _), (other, _) in zip(whole, resumed, strict=True):
        assert all(torch.equal(one.state()[k], v) for k, v in other.state().items())
        assert one.component_digest("first", b"b") == other.component_digest("first", b"b")


def test_statistics_leave_only_where_the_policy_lists_them() -> None:
    listed, kept = (trained(job(reveal=r), range(1)) for r in (["loss", "weights", "statistics"], ["loss", "weights"]))
    assert {"statistics.mean", "statistics.inverse"} <= set(listed[0][0].weight_halves()[0])
    assert not [name for name in kept[0][0].weight_halves()[0] if name.startswith("statistics")]
    for changes, words in (
        ({"reveal": ["loss", "statistics"]}, "without 'weights'"),
        ({"reveal": ["weights", "statistics"], "standardise": False}, "without job.standardise"),
        ({"task": "infer", "reveal": ["predictions"]}, "standardise in task 'infer'"),
    ):
        with pytest.raises(ConfigError, match=words):
            job(**changes)
    with pytest.raises(ConfigError, match=r"job\.standardise True on 2 workers"):
        fit_model(job(), workers=2, replicas=2)
    fit_model(job(verify="products"))


def messages(job: PrivateJob, inputs: Any = of_party) -> list[tuple[int, int, int, int]]:
    """(to, from, kind, bytes) of all messages of two steps, sorted."""
    planes = LocalPlanes(2, keep=True)

    def body(rt: Runtime) -> None:
        trainer = PrivateTrainer(rt, job, find_model(job.model), inputs(rt.party))
        for step in range(2):
            rt.begin_epoch(step)
            trainer.step(step)

    planes.run_three(body)
    came = planes.wire.received.items()
    return sorted((to, src, tag.kind, len(body)) for to, all_ in came for src, tag, body in all_)


def wild(p: int) -> PartyInputs:
    """What no honest owner's program shares: a hundred rows of anything that the ring holds."""
    mine = of_party(p)
    lo, hi = (part.copy() for part in mine.tensors["train_x"])
    rng = np.random.default_rng(11)
    junk = [rng.integers(-(2**63), 2**63, lo[:100].shape) for _ in range(3)]
    lo[:100], hi[:100] = junk[p], junk[(p + 1) % 3]
    return PartyInputs(p, 16, mine.tensors | {"train_x": (lo, hi)})


def test_wild_sums_of_a_hostile_owner_open_nothing_more() -> None:
    with pytest.raises(ConfigError, match="standardises columns up to 128"):
        check_units(job(), "train features", data().train_x * 2)
    loss_only = job(reveal=["loss"])
    calm = messages(loss_only)
    assert messages(loss_only, wild) == calm


COLUMNS = "{{target: {{column: y, values: [0, 1]}}, split: {{test: 0.5}}, columns: {{a: {a}, b: {b}}}}}"


def test_a_schema_gives_units_that_all_agree_on_and_no_statistics_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b,y\n" + "".join(f"{n * 100},{n % 3},{n % 2}\n" for n in range(8)))
    (tmp_path / "own.yaml").write_text(COLUMNS.format(a="standardise", b="{kind: one-hot, values: [0, 1, 2]}"))
    shares = "{kind: one-hot, values: [0, 1, 2], statistics: {shares: [1, 0, 0]}}"
    (tmp_path / "all.yaml").write_text(COLUMNS.format(a="{kind: standardise, statistics: {scale: 0.01}}", b=shares))
    layers = model_to_json(model_of_list(["linear"], 4, 2))
    tested = FittingPass(load_schema(tmp_path / "all.yaml"))
    for part in table_batches(tmp_path / "rows.csv"):
        tested.add(part)
    j = job(model=layers, test_rows=tested.test)

    def rows(schema: str) -> dict[str, np.ndarray]:
        args = argparse.Namespace(data=tmp_path / "rows.csv", labels=None, schema=tmp_path / schema, weights=None)
        return dict(rows_of(j, args).blocks())

    with pytest.raises(ConfigError, match="statistics would be of these rows alone"):
        rows("own.yaml")
    found = rows("all.yaml")
    units = sorted([*found["train_x"][:, 0], *found["test_x"][:, 0]])
    assert [value / 2**16 for value in units] == list(range(8))


@pytest.mark.parametrize("by", ["range", "quantiles"])
def test_columns_are_brought_to_0_to_1_by_ends_that_nobody_sees(by: Any) -> None:
    x = two_owners(40)
    x[3], x[5] = x.max(0) + 1, x.min(0) - 1  # what two quantiles cut
    mine = shared(x)

    def body(rt: Runtime) -> tuple[Standardiser, Share]:
        found = Standardiser(rt, 5, 16, by)
        rt.run(found.fit_protocol(mine[rt.party]))
        return found, rt.run(found.apply_protocol(mine[rt.party]))

    got = LocalPlanes(3).run_three(body)
    low, inverse = (reconstruct([s.statistics[i] for s, _ in got]).numpy().reshape(-1) for i in range(2))
    clear = ClearStatistics.of(np.rint(x * 65536) / 65536, by)
    assert np.array_equal(low, clear.mean)
    assert np.abs(inverse / clear.inverse - 1.0).max() < 5e-3
    scaled = reconstruct([y for _, y in got]).numpy()
    assert np.abs(scaled - clear.apply(x)).max() < 0.02
    assert scaled.min() > -1e-2
    assert scaled.max() < 1.01
    assert [name for name, _ in named(got[0][0])] == [
        f"statistics.{'least' if by == 'range' else 'lower'}",
        "statistics.inverse",
    ]


def test_how_columns_are_scaled_is_in_the_policy_and_nothing_is_opened_for_it() -> None:
    j = job(standardise_by="quantiles", reveal=["loss"], steps=1, loss_every=1)
    planes = LocalPlanes(2, keep=True)

    def body(rt: Runtime) -> None:
        rt.begin_epoch(0)
        PrivateTrainer(rt, j, find_model(j.model), of_party(rt.party)).step(0)

    planes.run_three(body)
    x = np.rint(np.concatenate([data().train_x, ClearStatistics.of(data().train_x, "range").mean[None]]) * 65536)
    words = {int(v) for v in x.astype(np.int64).reshape(-1) if v}
    for came in planes.wire.received.values():
        for _, _, message in came:
            assert not words & set(np.frombuffer(bytes(message)[: len(message) // 8 * 8], "<i8").tolist())
    with pytest.raises(ConfigError, match=r"without job\.standardise"):
        job(standardise=False, standardise_by="range")
    with pytest.raises(ConfigError, match="one of deviation, range, quantiles"):
        job(standardise_by="minmax")
    assert "standardise_by" not in job().to_json()
