"""Times of halts follow the step that is foretold: a drill of a model whose step takes a minute can be passed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from uvcc_console.cli import common
from uvcc_console.cli.main import main
from uvcc_console.haltd.service import ladder_times
from uvcc_console.plan import owndata, plan_rehearsal
from uvcc_console.plan.long_steps import fitted, foretells_gpus, group_timeout
from uvcc_console.plan.profile import available, load, parse
from uvcc_console.runs.processes import create_run
from uvcc_engine.contract.errors import UvccError

MODEL = "job.model=[{linear: 4}, relu, linear]"
REHEARSED = {
    "rounds": 20,
    "bytes": 1e5,
    "busiest": 1.5,
    "seconds": 9.0,
    "layers": [],
    "warnings": [],
    "most_frac_bits": 20,
    "memory": {"pod_mib": 512.0, "all_mib": 1400.0},
}
TOOK = {"low": 0.08, "high": 0.2, "early": 1.5, "party_cpu": 0.05, "all_cpu": 0.15, "cores": 2.0}
TOOK |= {"replicas": 1, "workers": 3}


def asked(**parts: Any) -> Any:
    job = {"kind": "private", "model": "mlp-digits", "steps": 2}
    return parse({"job": job, "fleet": {"provider": "local"}, **parts})


@pytest.mark.parametrize(
    ("step_s", "halt", "gates", "patience", "drill"),
    [
        (0.1, {}, {}, 10.0, 5.0),
        (4.9, {}, {}, 10.0, 40.0),  # the usual patience is enough, the usual drill is not
        (49.4, {}, {}, 99.0, 129.0),
        (49.4, {"patience": 20}, {"halt_drill_s": 30}, 20.0, 30.0),  # what a user wrote stays
        (49.4, {"lease": 90}, {"halt_drill_s": 0}, 99.0, 0.0),
        (3600.0, {}, {}, 600.0, 630.0),  # foretold here, on slower processors perhaps: no longer than this
        (0.0, {}, {}, 10.0, 5.0),  # nothing is known
    ],
)
def test_what_is_left_open_follows_the_step(
    step_s: float, halt: dict[str, float], gates: dict[str, float], patience: float, drill: float
) -> None:
    profile, notes = fitted(asked(halt=halt, gates=gates), step_s)
    assert (profile.halt.patience, profile.gates.halt_drill_s) == (patience, drill)
    assert profile.halt.lease == halt.get("lease", 60.0)
    assert bool(notes) == (step_s > 40)
    times = ladder_times(profile.model_dump(mode="json"))
    assert times.hold >= min(2 * step_s, 600.0) or "patience" in halt
    assert times.drill == times.hold + 20.0


def test_what_a_user_wrote_and_cannot_hold_is_told() -> None:
    _, notes = fitted(asked(halt={"patience": 20}, gates={"halt_drill_s": 30}), 49.4)
    assert notes == [
        "a step may take 49 s, and a pod holds between two steps: halt.patience of 20 s may be too short;"
        " 99 s would do",
        "gates.halt_drill_s of 30 s may be too short for such steps; 129 would do",
    ]


@pytest.mark.parametrize(
    ("job", "fleet", "step_s", "patience", "drill"),
    [
        ({}, {"gpu": "H100_80GB"}, 0.0, 20.0, 50.0),
        ({}, {"gpu": "H100_80GB"}, 4.9, 20.0, 50.0),
        ({}, {"gpu": "H100_80GB"}, 49.4, 99.0, 129.0),
        ({"device": "cuda"}, {}, 0.0, 20.0, 50.0),
        ({"device": "cpu"}, {"gpu": "H100_80GB"}, 0.0, 10.0, 5.0),
        ({}, {"gpu": "CPU_NODE"}, 0.0, 10.0, 5.0),
    ],
)
def test_a_gpu_s_first_step_compiles_and_has_the_time(
    job: dict[str, str], fleet: dict[str, str], step_s: float, patience: float, drill: float
) -> None:
    private = {"kind": "private", "model": "mlp-digits", "steps": 2} | job
    wanted = asked(job=private, fleet={"provider": "prime"} | fleet, limits={"hourly": 9, "total": 9, "ttl": "1h"})
    profile, notes = fitted(wanted, step_s)
    assert (profile.halt.patience, profile.gates.halt_drill_s) == (patience, drill)
    first = "the first step on a GPU may take 20 s, and a pod holds between two steps: it has 20 s to show it"
    assert [note.startswith(first) for note in notes] == ([True] if drill == 50.0 else [False] * (drill > 50))


def test_what_a_user_wrote_for_gpus_is_told_and_shipped_profiles_have_the_time() -> None:
    job = {"kind": "private", "model": "mlp-digits", "steps": 2, "device": "cuda"}
    _, notes = fitted(asked(job=job, gates={"halt_drill_s": 10}), 0.0)
    assert notes[1:] == ["gates.halt_drill_s of 10 s may be too short for such steps; 50 would do"]
    on_gpus = []
    for name in (shipped.name for shipped in available()):
        profile, notes = fitted(load(name)[1], 0.0)
        if foretells_gpus(profile):
            on_gpus.append(name)
            assert profile.gates.halt_drill_s >= 50.0, name
            assert not any("too short" in note for note in notes), name
    assert {"prime-smoke-r2", "prime-full-r8", "prime-phase6-r8s4t2m32"} <= set(on_gpus)


def test_a_plan_and_a_run_that_nobody_rehearses_have_the_time_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["job.device=cuda", "gates.halt_drill_s=10"]
    note = "gates.halt_drill_s of 10 s may be too short for such steps; 50 would do"
    assert main(["plan", "local-smoke-r2", "--no-rehearsal", *(w for s in asked for w in ("--set", s))]) == 0
    assert note in capsys.readouterr().out
    told: list[str] = []
    s = common.load_snapshot(create_run("local-smoke-r2", asked, tell=told.append))
    assert note in told
    assert s.profile["halt"]["patience"] == 20.0


def test_a_run_of_ones_own_model_is_given_the_times_and_its_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rehearse(args: Sequence[str], command: str) -> str:
        return json.dumps(REHEARSED | {"processes": TOOK | {"wall": 28.5}})

    monkeypatch.setattr(plan_rehearsal, "owners_program", rehearse)
    profile = "local-smoke-r2"
    assert main(["plan", profile, "--set", MODEL]) == 0
    note = "a step may take 30 s, and a pod holds between two steps: it has 61 s to show it (halt.patience)"
    assert note in capsys.readouterr().out
    told: list[str] = []
    s = common.load_snapshot(create_run(profile, [MODEL], tell=told.append))
    assert note in told
    assert s.profile["halt"]["patience"] == 61.0
    assert s.foretold is not None
    assert 600 < int(group_timeout(s.foretold)["UVCC_GROUP_TIMEOUT_S"]) < 620
    assert group_timeout(replace(s.foretold, seconds=2.0)) == {}
    assert group_timeout(None) == {}
    given = common.load_snapshot(create_run(profile, [MODEL, "halt.patience=15s"]))
    assert given.profile["halt"]["patience"] == 15.0


@pytest.mark.parametrize(
    ("command", "limit_s", "cure"), [("rehearse", 1800.0, "a smaller job.batch"), ("table", 300.0, "data too large")]
)
def test_a_rehearsal_has_the_time_of_a_long_step(
    command: str, limit_s: float, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args: Sequence[str], *, timeout: float, **rest: Any) -> None:
        assert timeout == limit_s
        raise subprocess.TimeoutExpired(args, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UvccError, match=f"longer than {limit_s:.0f} s") as late:
        owndata.owners_program([], command)
    assert cure in late.value.hint
