"""Beside proved rows stands a peer that bears a malicious party; what it costs includes what it draws in advance."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.bench import mpc as bench
from uvcc_engine.bench.peers import mpc_peers as peers
from uvcc_engine.bench.peers import mpspdz, mpspdz_proved, mpspdz_training
from uvcc_engine.bench.work import mpc_proofs as proofs

MACHINE = {f"fp64_{n}": [2e9] for n in (128, 512, 1024)} | {
    "ring_1024": [5e8], "ring_1024_transposed": [4.4e8], "ring_512": [5e8],
    "ring_128": [3e8], "aes": [1e9], "copy": [1e9],
}  # fmt: skip
# of a process with so many runs: 2 s, 3 MB of each party and 100 rounds at first, and 5 s, 7 MB and 50 rounds for each
PARTY = """
import os, sys
words, program = sys.argv[1:-1], sys.argv[-1]
assert words[-4:] == ["-b", "100000", "-B", "3"], words
open(os.environ["UVCC_TEST_RUN"], "a").write(program + "\\n")
runs = int(program.split("-")[2 if "training" in program else 3])
print(f"Time = {2 + 5 * runs} seconds ")
print(f"Data sent = {3 + 7 * runs} MB in ~{100 + 50 * runs} rounds (party 0 only; use '-v' for more details)")
print(f"Global data sent = {3 * (3 + 7 * runs)} MB (all parties)")
"""


def prepare(monkeypatch: pytest.MonkeyPatch, *rows: str) -> None:
    """Our own parties, who need two seconds for everything."""
    plain: dict[str, Any] = {"seconds": [2.0], "bytes": 3000, "rounds": 2, "products": 1, "cpu": [], "peak": 100}
    proved = plain | {"proof": [1.0], "proof_rounds": 5, "floor": 0.1}
    measured = [{row: proved if row in proofs.PASSIVE else plain for row in proofs.rows_of(rows)}] * 3
    monkeypatch.setattr(bench, "run_parties", lambda names, runs, split, device: measured)
    monkeypatch.setattr(bench.machine_rates, "measured", lambda runs: MACHINE)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that has both programs; ``ran.txt`` there says with what they were started."""
    (tmp_path / "compile.py").write_text("")
    for name, text in (
        ("replicated-ring-party.x", "print('Time1 = 10.5 seconds (3 MB, 9 rounds)')"),
        (mpspdz.PROVED_PARTY, PARTY),
    ):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{text}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv(mpspdz.MPSPDZ, str(tmp_path))
    monkeypatch.setenv("UVCC_TEST_RUN", str(tmp_path / "ran.txt"))
    return tmp_path


def told(capsys: pytest.CaptureFixture[str]) -> tuple[dict[tuple[str, str], dict[str, Any]], str]:
    said = capsys.readouterr()
    return {(r["name"], r["metric"]): r for r in json.loads(said.out)}, said.err


def test_a_peer_stands_beside_the_proved_row_with_all_that_a_run_costs(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(monkeypatch, "matmul_256", "mlp_step")
    asked = ["--rows", "matmul_256,mlp_step", "--runs", "4", "--verify", "--against", "mpspdz", "--json"]
    assert bench.main(asked) == 0
    rows, errors = told(capsys)
    for name in ("matmul_256_verified", "mlp_step_verified"):
        assert rows[f"{name}_mpspdz", "seconds"]["value"] == pytest.approx(5.0)
        assert rows[f"{name}_mpspdz", "bytes_per_party"]["value"] == pytest.approx(7e6)
        assert rows[f"{name}_mpspdz", "rounds"]["value"] == pytest.approx(50.0)
        share = rows[f"{name}_to_mpspdz", "ratio"]
        assert (share["value"], share["bar"], share["met"]) == (0.4, 1.0, True)
    assert rows["matmul_256_mpspdz", "seconds"]["value"] == 10.5 / 4  # the passive row has its passive peer
    lacking = "mlp_step_products_verified, mlp_step_covert"
    assert f"mpspdz, proved: no program for {lacking}\n" in errors
    ran = set((installed / "ran.txt").read_text().split())
    assert ran == {
        *("uvcc_proved-matmul-256-0-split3", "uvcc_proved-matmul-256-4-split3"),
        *("uvcc_proved_training-secureml-0-128-split3-opened", "uvcc_proved_training-secureml-4-128-split3-opened"),
    }


def test_without_proofs_nothing_of_it_is_run(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(monkeypatch, "matmul_256")
    monkeypatch.setattr(bench.mpc_proofs, "table", lambda measured: [])
    assert bench.main(["--rows", "matmul_256", "--against", "mpspdz", "--json"]) == 0
    assert {name for name, _ in told(capsys)[0] if "mpspdz" in name} == {"matmul_256_mpspdz", "matmul_256_to_mpspdz"}
    assert not (installed / "ran.txt").exists()


def test_what_is_not_built_and_what_proves_nothing_is_named(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(monkeypatch, "relu_1e6")
    monkeypatch.delenv(peers.SPU_PYTHON, raising=False)
    (installed / mpspdz.PROVED_PARTY).unlink()
    assert bench.main(["--rows", "relu_1e6", "--verify", "--against", "spu,mpspdz", "--json"]) == 0
    rows, errors = told(capsys)
    assert ("relu_1e6_mpspdz", "seconds") in rows
    assert ("relu_1e6_verified_mpspdz", "seconds") not in rows
    assert f"mpspdz, proved: absent: UVCC_MPSPDZ names no folder with a built {mpspdz.PROVED_PARTY}\n" in errors
    assert "spu, proved: its three parties trust each other to follow the protocol" in errors


@pytest.mark.parametrize(
    ("text", "why"), [("print('Time = 5 seconds')", "failed or told no time"), ("raise SystemExit(3)", "failed")]
)
def test_a_program_that_fails_is_named(
    text: str, why: str, installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(monkeypatch, "relu_1e6")
    (installed / mpspdz.PROVED_PARTY).write_text(f"#!{sys.executable}\n{text}")
    assert bench.main(["--rows", "relu_1e6", "--verify", "--against", "mpspdz", "--json"]) == 0
    assert f"mpspdz, proved: relu_1e6_verified {why}" in told(capsys)[1]
    (installed / "compile.py").write_text("raise SystemExit('no such type')")
    assert mpspdz_proved.measured(["relu_1e6_verified"], 1) == (
        {},
        "relu_1e6_verified could not be compiled: no such type",
    )


def test_every_row_of_which_every_message_is_proved_has_a_program() -> None:
    ours_alone = {"mlp_step_products_verified", "mlp_step_covert"}  # it has no such modes
    ours_alone |= {"mlp_step_20ms_verified"}  # nor a link of our making
    assert set(mpspdz_proved.PROGRAMS) == set(proofs.PASSIVE) - ours_alone
    assert "'opened' in program.args" in mpspdz_training.PROGRAM
    assert mpspdz_training.OPENED == "opened"
