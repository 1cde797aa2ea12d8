"""A resumed training ends in the very bits of one that was never interrupted, for several ranks as well."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from forked import ForkedRank, module
from lm_kit import free_port, start_ranks

pytestmark = pytest.mark.timeout(900)  # a busy machine
HERE = Path(__file__).parent


def started(folder: Path, world: int, accumulate: str, **more: object) -> list[int]:
    """Every rank's exit code."""
    folder.mkdir(exist_ok=True)
    main = module(HERE / "exact_rank.py", [str(folder), accumulate, "2", json.dumps(more)])
    env = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [ForkedRank({**env, "RANK": str(r)}, folder / f"stderr{r}.txt", main) for r in range(world)]
    for p in ranks:
        p.communicate(timeout=500)
    return [p.returncode for p in ranks]


def exact(folder: Path, world: int, accumulate: str, **more: object) -> dict[str, list[str]]:
    codes = started(folder, world, accumulate, **more)
    assert codes == [0] * world, [(folder / f"stderr{r}.txt").read_text() for r in range(world)]
    found: dict[str, list[str]] = json.loads((folder / "exact.json").read_text())
    return found


@pytest.mark.parametrize(
    ("world", "accumulate"),
    [
        *(pytest.param(world, "2", marks=pytest.mark.ci(__file__)) for world in (1, 2)),
        pytest.param(1, "1,4", marks=pytest.mark.slow),
        pytest.param(2, "1,4", marks=pytest.mark.slow),
        pytest.param(4, "1,2,4", marks=pytest.mark.slow),
    ],
)
def test_a_resume_is_exact_for_every_way_of_reducing(tmp_path: Path, world: int, accumulate: str) -> None:
    found = exact(tmp_path / "run", world, accumulate)
    assert len(found) == 4 * len(accumulate.split(","))
    assert {name for name, (straight, again) in found.items() if straight != again} == set()


def test_a_resume_of_two_ranks_is_exact_for_one_way_of_reducing(tmp_path: Path) -> None:
    ((straight, again),) = exact(tmp_path / "run", 2, "2", compress=["bf16"], static=[True]).values()
    assert straight == again


@pytest.mark.parametrize(
    "ddp", [{}, pytest.param({"shard": True}, marks=pytest.mark.ci(__file__))], ids=["copies", "parts"]
)
def test_a_fault_of_one_rank_takes_all_back_to_the_same_bits(tmp_path: Path, ddp: dict[str, object]) -> None:
    more: dict[str, object] = {"ddp": ddp} if ddp else {"static": [True]}
    train = {"nonfinite": "rollback"}
    found = exact(tmp_path / "run", 2, "2", train=train, struck=[1, 4], compress=["bf16"], **more)
    ((straight, again),) = found.values()
    assert straight == again
    told = [json.loads(x) for x in (tmp_path / "run" / "struck" / "events.jsonl").read_text().splitlines()]
    back = {(e["coord"], e["fields"]["left"], e["fields"]["step"]) for e in told if e["event"] == "rolled_back"}
    assert back == {("p0r0s0t0", 3, 2), ("p0r1s0t0", 3, 2)}


def test_a_fault_of_one_rank_makes_all_skip_the_step(tmp_path: Path) -> None:
    more = {"train": {"nonfinite": "skip", "steps": 4, "save_every": 2}, "struck": [1, 3]}
    exact(tmp_path / "run", 2, "1", compress=["off"], static=[False], **more)
    told = [json.loads(x) for x in (tmp_path / "run" / "struck" / "events.jsonl").read_text().splitlines()]
    assert {(e["coord"], e["fields"]["tensor"]) for e in told if e["event"] == "step_skipped"} == {
        ("p0r0s0t0", "another rank's part"),
        ("p0r1s0t0", "embed.weight"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("accumulate", ["1", "2", "4"])
@pytest.mark.parametrize("compress", ["bf16", "off"])
@pytest.mark.parametrize("static", [False, True])
def test_a_kill_at_any_step_changes_nothing(
    tmp_path: Path, world: int, accumulate: str, compress: str, static: bool
) -> None:
    """SIGKILL to one rank after a step; the others lose it; what all go on from ends as if nothing had been."""
    rng = random.Random(f"{world} {accumulate} {compress} {static}")
    killed = [rng.randrange(world), rng.randrange(1, 4)]
    ways = {"compress": [compress], "static": [static]}
    codes = started(tmp_path / "run", world, accumulate, killed=killed, **ways)
    assert codes[killed[0]] == -signal.SIGKILL
    assert 0 not in codes
    found = exact(tmp_path / "run", world, accumulate, killed=[], **ways)
    assert len(found) == 1
    assert {name for name, (straight, again) in found.items() if straight != again} == set()


@pytest.mark.parametrize(
    ("world", "share"),
    [
        pytest.param(world, share, marks=pytest.mark.ci(__file__) if (world, share) == (2, 0.6) else pytest.mark.slow)
        for world in (1, 2, 4)
        for share in (0.1, 0.35, 0.5, 0.6, 0.72, 0.85, 0.99)
    ],
)
def test_a_kill_before_any_write_changes_nothing(tmp_path: Path, world: int, share: float) -> None:
    """SIGKILL to one rank in the middle of a step, of a checkpoint, or of making room for the next one."""
    folder, killed = tmp_path / "run", random.Random(f"{world} {share}").randrange(world)
    ways = {"compress": ["bf16"], "static": [True], "train": {"save_every": 1, "keep": 1}}
    codes = started(folder, world, "2", moment=[killed, share], **ways)
    assert codes[killed] == -signal.SIGKILL, [(folder / f"stderr{r}.txt").read_text() for r in range(world)]
    assert 0 not in codes
    found = exact(folder, world, "2", killed=[], **ways)
    assert len(found) == 1
    assert {name for name, (straight, again) in found.items() if straight != again} == set()


@pytest.mark.parametrize(
    ("world", "accumulate"),
    [pytest.param(2, "2", marks=pytest.mark.ci(__file__)), pytest.param(4, "1,2,4", marks=pytest.mark.slow)],
)
def test_a_resume_is_exact_where_each_rank_holds_a_part(tmp_path: Path, world: int, accumulate: str) -> None:
    train = {"loss_chunk": 32, "eval_every": 2, "eval_batches": 1}  # a checkpoint follows each evaluation
    found = exact(tmp_path / "run", world, accumulate, ddp={"shard": True}, train=train)
    assert len(found) == 2 * len(accumulate.split(","))
    assert {name for name, (straight, again) in found.items() if straight != again} == set()


@pytest.mark.parametrize(
    "world", [pytest.param(2, marks=pytest.mark.ci(__file__)), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_resume_is_exact_where_two_ranks_compute_each_block(tmp_path: Path, world: int) -> None:
    ddp, model = {"shard": True, "tensor": 2}, {"n_kv_groups": 2}
    found = exact(tmp_path / "run", world, "2", compress=["off"], ddp=ddp, model=model)
    assert len(found) == 1
    assert {name for name, (straight, again) in found.items() if straight != again} == set()


@pytest.mark.ci(__file__)
def test_a_resume_is_exact_with_muon(tmp_path: Path) -> None:
    found = exact(tmp_path / "run", 1, "1", train={"optimizer": "muon"})
    assert {name for name, (straight, again) in found.items() if straight != again} == set()


@pytest.mark.ci(__file__)
def test_a_checkpoint_of_parts_goes_on_whole_and_the_other_way_round(tmp_path: Path) -> None:
    """Two ranks that compute each block together, then one with everything, then two with parts: files are whole."""
    for ranks, shard, tensor, steps in ((2, True, 2, 3), (1, False, 1, 6), (2, True, 1, 9)):
        ddp = {"ddp.shard": str(shard).lower(), "ddp.tensor": tensor, "model.n_kv_groups": 2, "train.steps": steps}
        changed = [word for key, value in ddp.items() for word in ("--set", f"{key}={value}")]
        processes = start_ranks(tmp_path, free_port(), *changed, world=ranks)
        said = [p.communicate(timeout=500)[1] for p in processes]
        assert [p.returncode for p in processes] == [0] * ranks, said
    lines = [json.loads(x) for x in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {e["fields"]["step"] for e in lines if e["event"] == "resumed"} == {3, 6}
