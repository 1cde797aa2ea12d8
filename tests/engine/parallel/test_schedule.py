"""The 1F1B schedule against the textbook, and the deadlock that one wrong receive makes."""

from __future__ import annotations

import pytest

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.parallel.schedule import PipelineAction, bubble, find_deadlock, one_f_one_b, program, render, table

TEXTBOOK_S4_M6 = """\
stage 0 | F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2  . B3  . B4  . B5
stage 1 |  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5  .
stage 2 |  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .  .
stage 3 |  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .  ."""


def test_the_textbook_table() -> None:
    assert render(4, 6) == TEXTBOOK_S4_M6


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 1), (2, 8), (4, 2), (4, 32), (3, 7)])
def test_every_microbatch_goes_forth_and_back_once_and_memory_is_bounded(
    stages: int, microbatches: int, depth: int
) -> None:
    for s in range(stages):
        order = one_f_one_b(s, stages, microbatches, depth)
        assert sorted(order) == sorted((k, m) for k in "FB" for m in range(microbatches))
        live = worst = 0
        for kind, _ in order:
            live += 1 if kind == "F" else -1
            worst = max(worst, live)
        assert worst <= stages - s + depth - 1


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 6), (4, 32)])
def test_idle_share_is_the_formulas(stages: int, microbatches: int) -> None:
    rows = table(stages, microbatches)
    busy = sum(1 for row in rows for t in row if t.kind)
    assert 1 - busy / (len(rows) * len(rows[0])) == pytest.approx(bubble(stages, microbatches))


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 4), (3, 5), (4, 32)])
def test_forward_only_receives_in_program_order_finish(stages: int, microbatches: int, depth: int) -> None:
    two_streams = [_split(program(s, stages, microbatches, depth)) for s in range(stages)]
    for direction in (0, 1):
        assert find_deadlock([streams[direction] for streams in two_streams]) == []


def _split(actions: list[PipelineAction]) -> tuple[list[PipelineAction], list[PipelineAction]]:
    """Own stream per direction: activations on one, gradients on the other."""
    return (
        [a for a in actions if a.kind in ("recv_act", "forward", "send_act")],
        [a for a in actions if a.kind in ("recv_grad", "backward", "send_grad")],
    )


def test_a_gradient_receive_posted_ahead_of_a_forward_send_deadlocks() -> None:
    """The planted copy of a real bug: one stream, and the backward receive is queued before the forward send."""

    def planted(stage: int) -> list[PipelineAction]:
        good = program(stage, 2, 2)
        if stage == 0:
            receive = PipelineAction("recv_grad", 0)
            rest = [a for a in good if a != receive]
            rest.insert(rest.index(PipelineAction("send_act", 0)), receive)
            return rest
        return good

    stuck = find_deadlock([planted(0), planted(1)])
    assert stuck == [
        "stage 0 waits in recv_grad of microbatch 0",
        "stage 1 waits in recv_act of microbatch 0",
    ]


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="stage 4 of 4"):
        one_f_one_b(4, 4, 2)
