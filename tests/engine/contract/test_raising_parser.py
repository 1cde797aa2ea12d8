"""Wrong usage of both commands: one line in the form of all errors, with what was probably meant, and exit code 2."""

from __future__ import annotations

import pytest

from uvcc_console.cli.main import main as uvcc
from uvcc_engine.cli import main as engine
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine.raising_parser import RaisingParser

WRONG = [
    ("uvcc rolout", "unknown verb 'rolout' (did you mean rollout?)"),
    ("uvcc --verson", "unknown option '--verson' (did you mean --version?)"),
    (
        "uvcc rollout --headles x",
        "unknown option '--headles' (did you mean --headless? see: uvcc rollout --help)",
    ),
    ("uvcc rollout", "the following arguments are required: PROFILE (see: uvcc rollout --help)"),
    ("uvcc rollout a b", "uvcc rollout does not take 'b' (see: uvcc rollout --help)"),
    ("uvcc halt x --timeout abc", "--timeout takes a number, not 'abc' (see: uvcc halt --help)"),
    ("uvcc demo --steps=many", "--steps takes a whole number of at least 1, not 'many' (see: uvcc demo --help)"),
    ("uvcc demo --steps", "--steps: expected one argument (see: uvcc demo --help)"),
    ("uvcc domain jion", "uvcc domain does not take 'jion' (did you mean 'join'?)"),
    (
        "uvcc domain show --jsno",
        "unknown option '--jsno' (did you mean --json? see: uvcc domain --help)",
    ),
    ("uvcc bench consol", "uvcc bench does not take 'consol' (did you mean 'console'?)"),
    ("uvcc-engine benc", "unknown command 'benc' (did you mean 'bench'?)"),
    ("uvcc-engine qqqq", "unknown command 'qqqq' (see: uvcc-engine --help)"),
    (
        "uvcc-engine --verson",
        "unknown option '--verson' (did you mean --version? see: uvcc-engine --help)",
    ),
    (
        "uvcc-engine bench mpc --runs 0",
        "--runs takes a whole number of at least 1, not '0' (see: uvcc-engine bench mpc --help)",
    ),
    (
        "uvcc demo --steps -3",
        "--steps takes a whole number of at least 1, not '-3' (see: uvcc demo --help)",
    ),
    ("uvcc-engine bench mcp", "unknown benchmark 'mcp' (did you mean 'mpc'?)"),
    ("uvcc-engine verify", "the following arguments are required: path (see: uvcc-engine verify --help)"),
    (
        "uvcc-engine verify x --alowed-signers y",
        "unknown option '--alowed-signers' (did you mean --allowed-signers? see: uvcc-engine verify --help)",
    ),
    ("uvcc-engine relay", "the following arguments are required: --config (see: uvcc-engine relay --help)"),
]


@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line.replace(" ", "_") for line, _ in WRONG])
def test_wrong_usage_is_one_line_with_what_was_meant(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *args = line.split()
    assert (uvcc if command == "uvcc" else engine)(args) == 2
    told = capsys.readouterr()
    assert told.err == f"error: {said}\n"
    assert not told.out


def test_a_benchmark_that_is_not_named_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine(["bench"]) == 2
    assert capsys.readouterr().err.startswith("error: the following arguments are required: NAME (one of: ab, ")


def test_a_word_far_from_all_that_is_taken_gets_the_list_and_a_long_one_is_cut() -> None:
    parser = RaisingParser(prog="p")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    with pytest.raises(ConfigError, match=r"^--device does not take 'q{80}…' \(one of: cpu, cuda\)$"):
        parser.parse_args(["--device", "q" * 500])
    with pytest.raises(ConfigError, match="did you mean 'cuda'"):
        parser.parse_args(["--device", "cud"])
