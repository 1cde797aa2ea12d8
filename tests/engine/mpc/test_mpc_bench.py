"""The benchmark measures what it says: the training step is right, delays are real, rows have their shape."""

from __future__ import annotations

import itertools
import json
import math
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from uvcc_engine.bench import mpc as bench
from uvcc_engine.bench.party import mpc_party as party_side
from uvcc_engine.bench.peers import mpc_peers as peers
from uvcc_engine.bench.peers import mpspdz
from uvcc_engine.bench.timing import machine_rates as machine
from uvcc_engine.bench.work import gpt_step, mpc_split
from uvcc_engine.bench.work import mpc_links as links
from uvcc_engine.bench.work import mpc_proofs as proofs
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.model.definition.specs import find_model, initial_weights
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.drawn_ahead import DrawAhead
from uvcc_engine.mpc.foundation.local import LocalPlanes, rehearsal_keys
from uvcc_engine.mpc.foundation.opening import open_many
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import reconstruct
from uvcc_engine.mpc.products.arithmetic import matmul_protocol
from uvcc_engine.plane.api import Tag
from uvcc_engine.proofs.statement import sizes_of
from uvcc_engine.proofs.step_proof import prove_and_open
from uvcc_engine.simulate.gpt_forecast import GptSize


@pytest.mark.parametrize(
    ("few", "proved", "rounds", "error"),
    [(True, False, 20, 2e-5), (False, False, 30, 2e-4), (True, True, 59, 2e-4), (False, True, 61, 2e-4)],
)
def test_the_benchmarked_step_is_a_training_step(
    few: bool, proved: bool, rounds: int, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forms that can be proved it took 84 rounds, before its proof."""
    monkeypatch.setattr(party_side, "BATCH", 16)
    sizes = (20, 12, 11, 10)

    def inputs(party: int) -> tuple[Any, Any, list[Any]]:
        x, y = party_side.normal(party, 16, 20), party_side.normal(party, 16, 10, scale=0.1)
        weights = [party_side.normal(party, a, b, scale=0.3) for a, b in itertools.pairwise(sizes)]
        return x, y, weights

    def body(rt: Runtime) -> list[torch.Tensor]:
        rt.few_rounds = few
        if proved:
            rt.ledger = ClaimLedger(everything=True)
        step = party_side.step_of(rt)
        new = rt.run(step(rt, *inputs(rt.party)))
        assert rt.rounds == rounds
        if not proved:
            return open_many(rt, new)
        return [ring.to(torch.float64) / 2.0**16 for ring in prove_and_open(rt, new)[1]]

    found = LocalPlanes().run_three(body)[0]
    all_inputs = [inputs(p) for p in range(3)]
    x, y = (reconstruct([i[k] for i in all_inputs]) for k in (0, 1))
    weights = [reconstruct([i[2][k] for i in all_inputs]).requires_grad_() for k in range(3)]
    hidden = ((x @ weights[0]).relu() @ weights[1]).relu()
    logits = hidden @ weights[2]
    gradient = (logits.softmax(-1) - y).detach()
    logits.backward(gradient)
    for got, w in zip(found, weights, strict=True):
        assert (got - (w - 0.125 / 16 * w.grad)).abs().max() < error


def test_the_proved_step_has_as_many_numbers_as_the_manual_says() -> None:
    def body(rt: Runtime) -> int:
        rt.few_rounds, rt.ledger = False, ClaimLedger(everything=True)
        party_side.works(rt.party)["mlp_step"]().run(rt)
        found = sizes_of(*rt.ledger.take(), rt.party)
        return found.elements + sum(terms * count for terms, count in found.equations)

    page = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    (numbers,) = set(LocalPlanes().run_three(body))
    assert f"the MLP step's {round(numbers, -3):,} numbers" in " ".join(page.split())


def test_the_step_s_bytes_are_those_that_the_manual_explains() -> None:
    planes = LocalPlanes()

    def body(rt: Runtime) -> tuple[int, int]:
        rt.few_rounds = False
        party_side.works(rt.party)["mlp_step"]().run(rt)
        return rt.rounds, rt.bytes_sent

    found = planes.run_three(body)
    assert {one[0] for one in found} == {30}
    sent = sum(one[1] for one in found) / 3
    assert round(sent) == 4_388_011
    assert max(one[1] for one in found) < 1.05 * sent  # each party deals of some operations
    gradient = 784 * 128 * (24 + 5 * 4) / 3  # shifted by 26 bits, of which four bytes are sent
    assert 0.33 < gradient / sent < 0.34


def test_the_step_over_slow_lines_keeps_all_three_busy() -> None:
    """A round takes as long as its longest line. The longest lines of all rounds together are not much more than what
    each party sends; they were 2.3 times as much where each layer had one dealer, and 1.56 times where the softmax and
    the update had one."""
    planes = LocalPlanes()
    rounds: list[dict[int, int]] = [{}, {}, {}]

    def body(rt: Runtime) -> int:
        send, mine = rt.plane.send, rounds[rt.party]

        def counting(dst: int, tag: Tag, payload: Any) -> None:
            mine[rt.rounds] = mine.get(rt.rounds, 0) + memoryview(payload).nbytes
            send(dst, tag, payload)

        rt.plane.send = counting  # type: ignore[method-assign]
        party_side.works(rt.party)["mlp_step"]().run(rt)
        return rt.bytes_sent

    sent = planes.run_three(body)
    longest = sum(max(party.get(k, 0) for party in rounds) for k in range(20))
    assert sum(sum(party.values()) for party in rounds) == sum(sent)
    assert longest < 1.16 * sum(sent) / 3
    assert max(sent) < 0.36 * sum(sent)


def test_the_benchmarked_gpt_learns_its_letters() -> None:
    """Every run is a step of one training: three of them lower the loss that the parties open."""
    few = GptSize(vocabulary=5, positions=4, width=8, heads=2, blocks=1, batch=4)

    def body(rt: Runtime) -> list[float]:
        step, losses = gpt_step.stepping(rt.party, few), []
        for epoch in range(3):
            rt.begin_epoch(epoch)
            losses.append(step(rt).loss)
        return losses

    found = LocalPlanes().run_three(body)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == pytest.approx(math.log(few.vocabulary), abs=0.7)
    assert found[0][2] < found[0][0]


def test_a_gpt_row_is_measured_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped tiny GPT, with rounds and bytes within the bars of its row."""
    monkeypatch.setattr(party_side, "barrier", lambda rt: None)
    planes = LocalPlanes()

    def body(rt: Runtime) -> dict[str, Any]:
        rt.few_rounds = False
        return party_side.measure(rt, party_side.works(rt.party)["gpt_tiny_step"](), 1)

    found = planes.run_three(body)
    _, most_bytes, most_rounds = bench.GPU_BARS["gpt_tiny_step"]
    assert found[0]["rounds"] == found[1]["rounds"] <= most_rounds < found[0]["rounds"] * 1.05
    assert sum(one["bytes"] for one in found) / 3 <= most_bytes
    assert found[0]["products"] == party_side.LOCAL_PRODUCTS * gpt_step.TINY.macs
    assert gpt_step.TINY.weights == sum(w.size for w in initial_weights(find_model("gpt-tiny"), 7, 14))


def test_every_row_has_its_work() -> None:
    assert set(party_side.works(0)) == {links.work_of(name) for name in (*bench.ROWS, *bench.GPU_BARS)}


def test_the_name_of_a_row_says_its_link() -> None:
    assert links.link_of("mlp_step_20ms_100mbit") == (0.020, 12.5e6)
    assert links.link_of("mlp_step_10gbit") == (0.0, 1.25e9)
    assert links.link_of("relu_1e6_k32") == (0.0, float("inf"))
    assert links.work_of("mlp_step_20ms_1gbit") == "mlp_step"
    assert links.passive_floor_s("mlp_step_20ms_100mbit", 20, 2.5e6) == pytest.approx(0.4 + 0.2)


def test_a_slow_line_sends_one_message_after_the_other() -> None:
    three = LocalPlanes()
    sender, receiver = (party_side.DelayedPlane(three.planes[p], 0.0, 1e5) for p in (0, 1))
    begun = time.monotonic()
    for seq in range(2):
        sender.send(1, Tag(0, 0, seq, 1), bytes(5000))
    for seq in range(2):
        assert len(receiver.recv(0, Tag(0, 0, seq, 1))) == 5000
    assert time.monotonic() - begun >= 0.1


def test_a_delayed_plane_delivers_late() -> None:
    three = LocalPlanes()
    sender, receiver = (party_side.DelayedPlane(three.planes[p], 0.05) for p in (0, 1))
    tag = Tag(0, 0, 0, 1)
    begun = time.monotonic()
    sender.send(1, tag, b"payload")
    assert bytes(receiver.recv(0, tag)) == b"payload"
    assert time.monotonic() - begun >= 0.05
    sender.send(1, tag, b"x")
    inner = three.planes[1].recv(0, tag)
    assert struct.unpack("<d", inner[:8])[0] >= begun


MACHINE = {f"fp64_{n}": [1e9, 3e9, 2e9] for n in (128, 512, 1024)} | {
    "ring_1024": [5e8], "ring_1024_transposed": [4.4e8], "ring_512": [5e8],
    "ring_128": [3e8], "aes": [1e9], "copy": [1e9],
}  # fmt: skip


def prepare(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    measured = [{name: {"seconds": [1.0, 2.0, 9.0], "products": 8 * 10**9, "rounds": 2, "bytes": p}} for p in range(3)]
    measured[1][name]["seconds"] = [3.0, 1.0, 1.0]
    monkeypatch.setattr(bench, "run_parties", lambda rows, runs, split, device: measured)
    monkeypatch.setattr(bench.machine_rates, "measured", lambda runs: MACHINE)
    monkeypatch.setattr(bench, "available_cores", lambda: 2)


def test_rows_take_the_slowest_party_and_the_median_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(monkeypatch, "matmul_512")
    assert bench.main(["--rows", "matmul_512", "--json"]) == 0
    rows = {(r["name"], r["metric"]): r for r in json.loads(capsys.readouterr().out)}
    seconds, sent = rows["matmul_512", "seconds"], rows["matmul_512", "bytes_per_party"]
    assert (seconds["value"], seconds["min"], seconds["max"], seconds["runs"]) == (3.0, 2.0, 9.0, 3)
    # 8e9 products at 2e9 a second on two cores, and three bytes
    assert seconds["reference"] == pytest.approx(2.0)
    assert seconds["ratio"] == pytest.approx(1.5)
    assert (sent["value"], sent["unit"], sent["met"]) == (1.0, "B", True)
    assert rows["matmul_512", "rounds"]["value"] == 2.0
    assert bench.main(["--rows", "matmul_512"]) == 0
    assert "1.50 of 2" in capsys.readouterr().out


def test_the_delay_of_the_rounds_is_part_of_the_floor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(monkeypatch, "mlp_step_20ms")
    assert bench.main(["--rows", "mlp_step_20ms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert next(r for r in rows if r["metric"] == "seconds")["reference"] == pytest.approx(2.04)


def test_rows_on_a_gpu_are_held_against_its_8_bit_units(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(monkeypatch, "matmul_1024")
    monkeypatch.setattr(bench, "device_for", lambda wanted: torch.device("cpu"))
    rates = {"int8": [144e9], "copied": [3e12], "ring_1024": [1e9], "ring_4096": [3e9], "ring_8192": [1e9]}
    monkeypatch.setattr(bench.gpu_rates, "measured", lambda runs: rates)
    monkeypatch.setattr(bench.gpu_rates, "described", lambda: "a GPU")
    assert bench.main(["--device", "cuda", "--rows", "matmul_1024", "--json"]) == 0
    said = capsys.readouterr()
    rows = {(r["name"], r["metric"]): r for r in json.loads(said.out)}
    assert "a GPU" in said.err
    ring = rows["ring_gemm_gpu_8192", "rate"]
    assert (ring["value"], ring["reference"], ring["bar"], ring["met"]) == (0.001, 0.004, 0.002, False)
    # 8e9 products at 144e9 / 36 a second of the one GPU, and what three bytes take on two cores
    assert rows["matmul_1024", "seconds"]["reference"] == pytest.approx(2.0)


def test_a_gpu_is_asked_for_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="reaches no GPU here"):
        bench.main(["--device", "cuda"])
    with pytest.raises(ConfigError, match="compute on processors"):
        bench.main(["--device", "cuda", "--verify"])
    with pytest.raises(ConfigError, match="unknown row 'relu_1e7'"):
        bench.main(["--rows", "relu_1e7"])


def test_the_machine_has_rows_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(monkeypatch, "mul_1e6")
    assert bench.main(["--rows", "mul_1e6", "--json"]) == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)}
    assert {"machine_fp64_gemm", "machine_aes", "machine_copy"} <= set(rows)
    plain, transposed, small = (rows[f"ring_gemm_{n}"] for n in ("1024", "1024_transposed", "128"))
    assert (plain["reference"], plain["ratio"], plain["bar"], plain["met"]) == (2.0, 0.25, 0.4, True)
    assert (transposed["bar"], transposed["met"]) == (0.45, False)
    assert (small["bar"], small["met"]) == (0.4, False)


def test_the_rates_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "SIZES", (8, 16))
    monkeypatch.setattr(machine, "LEAST_S", 0.0)
    honest = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda n, **more: honest(min(n, 4096), **more))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    assert machine.main(["2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"fp64_8", "ring_8", "fp64_16", "ring_16", "ring_1024_transposed", "aes", "copy"}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in found.values())


def test_absent_peers_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(monkeypatch, "mul_1e6")
    monkeypatch.delenv(peers.SPU_PYTHON, raising=False)
    monkeypatch.setenv(mpspdz.MPSPDZ, "/nowhere/at/all")
    assert bench.main(["--rows", "mul_1e6", "--against", "spu,mpspdz"]) == 0
    said = capsys.readouterr().err
    assert "spu: absent" in said
    assert "mpspdz: absent" in said
    with pytest.raises(ConfigError, match="abacus"):
        bench.main(["--against", "spu,abacus"])


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def test_a_peer_stands_beside_our_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prepare(monkeypatch, "matmul_512")
    said = "import json, sys\nprint(json.dumps({r: [5.0, 7.0, 6.0] for r in sys.argv[2].split(',')}))\n"
    monkeypatch.setenv(peers.SPU_PYTHON, str(script(tmp_path / "python", said)))
    assert bench.main(["--rows", "matmul_512", "--json", "--against", "spu"]) == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)}
    assert rows["matmul_512_spu"]["value"] == 6.0
    assert rows["matmul_512_to_spu"]["value"] == 0.5
    assert (rows["matmul_512_to_spu"]["bar"], rows["matmul_512_to_spu"]["met"]) == (0.4, False)


@pytest.mark.parametrize("text", ["print('[1]')", "raise SystemExit('no ring')", "print('{')", ""])
def test_a_peer_that_fails_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    prepare(monkeypatch, "matmul_512")
    monkeypatch.setenv(peers.SPU_PYTHON, str(script(tmp_path / "python", text)))
    assert bench.main(["--rows", "matmul_512", "--against", "spu"]) == 0
    assert "spu: " in capsys.readouterr().err


def test_mp_spdz_is_compiled_run_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prepare(monkeypatch, "matmul_512")
    script(tmp_path / "compile.py", "import sys\nassert sys.argv[1:3] == ['-R', '64'], sys.argv\nopen(sys.argv[3])\n")
    party = "import sys\nassert sys.argv[-1] == 'uvcc_bench-matmul-512-5-trunc_pr-split3', sys.argv\n"
    script(
        tmp_path / "replicated-ring-party.x",
        party + "print('Time = 9 seconds\\nTime1 = 10.5 seconds (3 MB, 9 rounds)')",
    )
    monkeypatch.setenv(mpspdz.MPSPDZ, str(tmp_path))
    assert bench.main(["--rows", "matmul_512", "--json", "--against", "mpspdz"]) == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)}
    assert rows["matmul_512_mpspdz"]["value"] == pytest.approx(2.1)
    assert rows["matmul_512_to_mpspdz"]["met"] is False


def test_mp_spdz_trains_the_step_with_its_own_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prepare(monkeypatch, "mlp_step")
    script(tmp_path / "compile.py", "import sys\nassert sys.argv[4] == 'secureml', sys.argv\n")
    script(tmp_path / "replicated-ring-party.x", "print('Time1 = 4 seconds (3 MB, 9 rounds)')")
    monkeypatch.setenv(mpspdz.MPSPDZ, str(tmp_path))
    assert bench.main(["--rows", "mlp_step", "--json", "--against", "mpspdz"]) == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)}
    assert rows["mlp_step_mpspdz"]["value"] == pytest.approx(0.4)
    assert rows["mlp_step_to_mpspdz"]["bar"] == 0.35


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="matmul_7"):
        bench.main(["--rows", "matmul_7"])


def test_a_proved_row_stands_beside_the_passive_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proofs.rows_of(["drelu_1e6", "mlp_step", "matmul_256"]) == [
        "mlp_step",
        "mlp_step_verified",
        "mlp_step_products_verified",
        "mlp_step_covert",
        "matmul_256",
        "matmul_256_verified",
    ]
    assert {proofs.work_of(name) for name in proofs.PASSIVE} <= set(party_side.works(0))
    assert proofs.PASSIVE.keys() == proofs.BARS.keys()
    plain = {"seconds": [0.5, 1.0], "bytes": 3000, "rounds": 2, "products": 1, "cpu": [], "peak": 100}
    proved = plain | {"seconds": [2.0, 4.0], "bytes": 3300, "rounds": 14, "peak": 250}
    proved |= {"proof": [1.0, 2.0], "proof_rounds": 12, "floor": 0.2}
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    rows = proofs.table([{"matmul_256": plain, "matmul_256_verified": proved}] * 3)
    assert [(r.metric, r.ratio, r.met) for r in rows] == [
        ("seconds", 4.0, True),
        ("bytes_per_party", pytest.approx(1.1), False),
        ("proof_seconds", 0.5, None),
        ("proof_floor", pytest.approx(3 * 0.2 / 2 / 1.5), None),
        ("rounds", 7.0, None),
        ("proof_rounds", None, False),
        ("peak_memory", 2.5, True),
    ]


def test_a_proved_row_s_work_is_proved() -> None:
    def body(rt: Runtime) -> tuple[int, int]:
        proofs.open_ledger(rt, "matmul_256_verified")
        rt.run(matmul_protocol(rt, party_side.normal(rt.party, 4, 4), party_side.normal(rt.party, 4, 4)))
        rounds, filed = rt.rounds, len(rt.ledger or [])
        proofs.prove(rt)
        return rt.rounds - rounds, filed - len(rt.ledger or [])

    for rounds, proved in LocalPlanes().run_three(body):
        assert rounds > 4
        assert proved == 5  # the product; the mask's carries and its two top bits; the part of each online party


def test_a_row_that_is_audited_by_chance_is_the_mean_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the steps prove something and some do not; most rounds, mean bytes."""
    monkeypatch.setattr(proofs, "AUDIT_ONE_IN", 2)
    assert proofs.steps_of("mlp_step_covert") == proofs.STEPS > proofs.steps_of("mlp_step_verified") == 1
    seen: list[list[int]] = [[], [], []]
    monkeypatch.setattr(party_side, "barrier", lambda rt: None)

    def body(rt: Runtime) -> dict[str, Any]:
        proofs.open_ledger(rt, "mlp_step_covert")
        x, before = party_side.normal(rt.party, 4, 4), [0]

        def step(rt: Runtime) -> None:
            seen[rt.party].append(rt.bytes_sent - before[0])
            before[0] = rt.bytes_sent
            rt.run(matmul_protocol(rt, x, x))

        return party_side.measure(rt, party_side.Work(step), 2, steps=8)

    found = LocalPlanes(1).run_three(body)
    for one, sent in zip(found, seen, strict=True):
        assert [len(one[key]) for key in ("seconds", "proof", "cpu", "thread")] == [2] * 4
        assert one["proof_rounds"] == 5, (
            "so small a product has one fold and the last; 2 rounds where nobody is audited"
        )
        assert len({*sent[2:]}) > 1
        assert min(sent[2:]) < one["bytes"] < max(sent[2:])


def test_the_split_counts_what_dealers_send_and_what_is_drawn() -> None:
    """A truncated product in two rounds: the dealer's part is a known share of what is said."""

    def body(rt: Runtime) -> dict[str, Any]:
        rt.time_draws()
        x = party_side.normal(rt.party, 2_000)  # so many that their draws are foretold
        work = party_side.Work(lambda rt: rt.run(party_side.relu_only_protocol(rt, x)))
        measured = party_side.measure(rt, work, 1)
        return {"relu": measured | {"ahead": party_side.measure(rt, work, 1, ahead)["thread"]}}

    ahead, planes = DrawAhead(), LocalPlanes()
    planes.runtimes = [Runtime(p, planes.planes[p], rehearsal_keys(0)[p], b"s" * 32, ahead=ahead) for p in range(3)]
    found = planes.run_three(body)
    assert all(rt.forecast is not None and rt.forecast.met > 0 for rt in planes.runtimes)
    ahead.close()
    dealers = [party["relu"]["dealt"] for party in found]
    assert sum(d > 0 for d in dealers) == 1, "one party deals"
    assert 0 < max(dealers) < sum(party["relu"]["bytes"] for party in found)
    rows = {(row.name, row.metric): row for row in mpc_split.table(found, ["relu"])}
    whole = sum(party["relu"]["bytes"] for party in found) / 3
    assert rows["relu_offline", "bytes_per_party"].value == pytest.approx(sum(dealers) / 3)
    assert rows["relu_online", "bytes_per_party"].value == pytest.approx(whole - sum(dealers) / 3)
    assert rows["relu_offline", "seconds"].value > 0
    assert rows["relu_ahead", "seconds"].value > 0


def test_a_run_that_was_not_split_has_no_such_rows() -> None:
    assert mpc_split.table([{"relu": {"cpu": [1.0], "bytes": 8}}] * 3, ["relu"]) == []
