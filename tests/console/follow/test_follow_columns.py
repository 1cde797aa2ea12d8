"""Columns of strangers' tables: meanings by many spellings, and nothing that a line holds raises."""

from __future__ import annotations

import math
import os
import random

import pytest

from uvcc_console.follow.columns import MOST_NAMES, DelimitedTable, FigureNames, JsonLinesTable, called


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Train Loss", "loss"),
        ("train/loss", "loss"),
        ("learning_rate", "lr"),
        ("tokens/s", "toks_per_s"),
        ("tokens_per_sec", "toks_per_s"),
        ("eval_loss", "val_loss"),
        ("grad norm", "grad_norm"),
        ("\x1b[31mred", "x_31mred"),
        ("μ", ""),
    ],
)
def test_a_column_is_called_by_what_it_means(name: str, wanted: str) -> None:
    assert called(name) == wanted


def test_a_table_with_names_units_and_gaps() -> None:
    table = DelimitedTable()
    rows = table.rows(["global_step;loss;eval_loss;epoch;time", "1;2.5;;0;99", "2;nan;2.25;0;100", "x;1;;;", "3;2"])
    assert [(r.step, sorted(r.values)) for r in rows] == [(1, ["loss"]), (2, ["eval_loss", "loss"]), (3, ["loss"])]
    assert math.isnan(rows[1].values["loss"])
    assert table.bad == 1  # a row whose step is none


def test_rows_are_counted_where_no_column_counts_them() -> None:
    assert [r.step for r in DelimitedTable().rows(["loss,acc", "2,0.1", "1,0.2"])] == [1, 2]
    rows = DelimitedTable().rows(["2,0.1", "1,0.2"])  # no line of names at all
    assert [(r.step, dict(r.values)) for r in rows] == [
        (1, {"column_1": 2.0, "column_2": 0.1}),
        (2, {"column_1": 1.0, "column_2": 0.2}),
    ]


def test_json_lines_are_flattened_and_booleans_are_no_numbers() -> None:
    table = JsonLinesTable()
    rows = table.rows(
        [
            '{"step": 3, "train": {"loss": 1.5, "ok": true}, "ts": 9}',
            '{"msg": "hello"}',
            "no",
            '{"step": "x", "loss": 1}',
        ]
    )
    assert [(r.step, dict(r.values)) for r in rows] == [(3, {"train/loss": 1.5})]
    assert table.bad == 2


def test_two_files_with_one_name_do_not_mix() -> None:
    names = FigureNames()
    assert names.of("a.csv", "a", "loss") == "loss"
    assert names.of("b.csv", "b", "loss") == "b/loss"
    assert names.of("a.csv", "a", "loss") == "loss"
    given = {names.of("c.csv", "c", f"figure{i}") for i in range(MOST_NAMES + 5)}
    assert "" in given
    assert len(names.refused) >= 5


def test_no_line_raises() -> None:
    dice = random.Random(int(os.environ.get("UVCC_FUZZ_SEED", "17")))
    signs = 'step,loss\n"1;\t{}[]:0.5e9nan\x00\x1b-+é'
    for _ in range(3000):
        line = "".join(dice.choice(signs) for _ in range(dice.randrange(40)))
        table, objects = DelimitedTable(), JsonLinesTable()
        for row in (*table.rows(["step,loss", line, "1,2"]), *table.rows([line]), *objects.rows([line])):
            assert 0 <= row.step <= 10**9


def test_the_second_loss_of_a_run_directory_is_the_tables_own() -> None:
    """Heartbeats had the name first, and a table called training has no loss of the same meaning beside it: it was told
    that there were more figures than a run may have."""
    names = FigureNames()
    assert names.of("p0r0/heartbeat_rank0.jsonl", "heartbeat_rank0", "loss") == "loss"
    assert names.of("p0r0/training.csv", "training", "loss") == "training/loss"
    assert names.of("val.csv", "val", "loss") == "val_loss"
    assert not names.refused
