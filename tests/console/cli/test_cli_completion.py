"""The Tab key: what the parsers take is offered, and bash, zsh and fish themselves show it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ui"))
from ui_journals import RUN, Story

from uvcc_console.cli import common
from uvcc_console.cli.machine import completion
from uvcc_console.cli.machine.candidates import FILES, candidates
from uvcc_console.cli.main import VERBS, main, module_of
from uvcc_console.core import paths

SHELLS = ("bash", "zsh", "fish")
PATIENCE_S = 500.0


def words(*typed: str) -> list[str]:
    return [found.word for found in candidates(typed)]


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_every_verb_is_offered(verb: str) -> None:
    parser = common.parser_of(module_of(verb).run)
    listed = {o for action in parser._actions for o in action.option_strings if o.startswith("--")}
    assert set(words(verb, "-")) == listed
    assert "--help" in listed


def test_what_stands_at_the_cursor_decides() -> None:
    Story().full(3).write(paths.runs_dir() / RUN)
    assert words("sta") == ["status"]
    assert words("status", "") == ["last", "current", RUN]
    assert words("owner", "s") == ["share"]
    assert words("owner", "share", "--re") == ["--relay"]
    assert words("owner", "share", "--relay", "u", "--re") == []
    assert words("owner", "share", "--data", "") == [FILES]
    assert words("owner", "share", "--data=x", "--sch") == ["--schema"]
    assert words("bench", "j") == ["journal"]
    assert words("rollout", "--set", "job.loss_e") == ["job.loss_every="]
    assert words("rollout", "--set", "job.opt") == ["job.optimizer="]
    assert words("rollout", "--set", "job.optimizer=a") == ["job.optimizer=adam"]
    assert words("rollout", "--set", "job.optimizer", "=") == ["job.optimizer=sgd", "job.optimizer=adam"]
    assert words("rollout", "--set", "fleet.provider=inv") == ["fleet.provider=inventory"]
    assert words("rollout", "--set", "job.optimizer", "=", "s") == ["job.optimizer=sgd"]
    assert words("rollout", "--set", "job.lr=1", "--s") == ["--seed", "--silence", "--set"]
    assert words("rollout", "dem") == ["demo", FILES]
    assert words("verify", "cur") == ["current", FILES]
    assert words("verify", "--req") == ["--require"]
    assert words("docs", "tutorials/fi") == ["tutorials/first-run"]
    assert words("pod", RUN, "st") == ["stackdump"]
    assert words("nonsense", "") == words("rollout", "--seed", "") == []


def test_asking_does_nothing_of_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--at", "domain", "init", "--pass"]) == 0
    assert (
        capsys.readouterr().out == "--passphrase\thave ssh-keygen ask for one; it asks again whenever the key signs\n"
    )
    assert not (paths.config_dir() / "domain").exists()
    with pytest.raises(LookupError):
        common.parser_of(lambda argv: None)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A user with this installation's ``uvcc`` on the path, one run, and a file to be offered."""
    Story().full(3).write(paths.runs_dir() / RUN)
    (tmp_path / "rows.csv").write_text("")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOME": str(tmp_path), "TERM": "dumb"}


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


CASES = (
    ("uvcc stat", "status"),
    ("uvcc status demo-", RUN),
    ("uvcc owner share --rel", "--relay"),
    ("uvcc rollout --set job.loss_e", "job.loss_every="),
    ("uvcc owner share --data row", "rows.csv"),
)
CUT_AT_EQUALS = "uvcc rollout demo --set link = d"  # as bash hands the words over


@pytest.mark.parametrize("name", SHELLS)
def test_the_shell_can_read_its_script(name: str, tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(completion.script(name))
    subprocess.run([shell(name), "-n", str(tmp_path / "completion")], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(("line", "wanted"), [*CASES, (CUT_AT_EQUALS, "direct")])
def test_bash_completes(line: str, wanted: str, env: dict[str, str], tmp_path: Path) -> None:
    *_, last = typed = line.split()
    quoted = " ".join(typed)
    ask = f'COMP_WORDS=({quoted}); COMP_CWORD={len(typed) - 1}; _uvcc; printf "%s\\n" "${{COMPREPLY[@]}}"'
    code = completion.script("bash") + "\n" + ask
    done = subprocess.run(
        [shell("bash"), "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
        env=env,
        cwd=tmp_path,
    )
    assert wanted in done.stdout.splitlines()
    assert all(found.startswith(last) for found in done.stdout.splitlines())


ODD = ("two words", "it's", "run$(touch PWNED)", "a;touch PWNED", "b`touch PWNED`", "star*", "run-ü")


@pytest.fixture
def odd_runs(env: dict[str, str]) -> dict[str, str]:
    """Folders of runs under names that only a copy by hand has."""
    for name in (*ODD, "-dash", "bell\a"):
        Story().full(3).write(paths.runs_dir() / name)
    return env | {"LC_ALL": "C.UTF-8"}


def test_bash_quotes_what_it_would_else_run(odd_runs: dict[str, str], tmp_path: Path) -> None:
    ask = "COMP_WORDS=(uvcc status ''); COMP_CWORD=2; _uvcc"
    typed = 'for w in "${COMPREPLY[@]}"; do eval "set -- $w"; printf "%s\\n" "$@"; done'
    code = "\n".join([completion.script("bash"), ask, typed])
    done = subprocess.run(
        [shell("bash"), "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, env=odd_runs, cwd=tmp_path
    )
    assert sorted(done.stdout.splitlines()) == sorted((*ODD, RUN, "last", "current")), done.stderr
    assert not (tmp_path / "PWNED").exists()


def test_zsh_quotes_what_it_would_else_run(odd_runs: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(completion.script("zsh"))
    begin = "PS1='> '; autoload -U compinit; compinit -u -D; source ./completion; bindkey '^I' complete-word\n"
    for shown in typed_at(shell("zsh"), [begin, "uvcc status tw\t"], odd_runs, tmp_path):
        if shown.rpartition("uvcc status ")[2].startswith(r"two\ words"):
            return
    raise AssertionError(shown)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [pytest.param(*value, marks=pytest.mark.ci(__file__) if n % 3 else ()) for n, value in enumerate(CASES)],
)
def test_fish_completes(line: str, wanted: str, env: dict[str, str], tmp_path: Path) -> None:
    code = completion.script("fish") + f"\ncomplete -C '{line}'"
    done = subprocess.run(
        [shell("fish"), "-N", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
        env=env,
        cwd=tmp_path,
    )
    assert wanted in [found.split("\t")[0] for found in done.stdout.splitlines()], done.stderr


def typed_at(program: str, keys: list[str], env: dict[str, str], folder: Path) -> Iterator[str]:
    """All that an interactive shell has shown so far, again and again while keys are typed and answered."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(program, [program, "-f", "-i"], env)
    shown, end = "", time.monotonic() + PATIENCE_S
    try:
        for key in keys:
            os.write(fd, key.encode())
        while time.monotonic() < end:
            ready, _, _ = select.select([fd], [], [], 1.0)
            if ready:
                shown += os.read(fd, 65536).decode(errors="replace")
            yield shown
    finally:
        os.close(fd)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [pytest.param(*value, marks=pytest.mark.ci(__file__) if n % 3 else ()) for n, value in enumerate(CASES)],
)
def test_zsh_completes(line: str, wanted: str, env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(completion.script("zsh"))
    begin = "PS1='> '; autoload -U compinit; compinit -u -D; source ./completion; bindkey '^I' complete-word\n"
    rest = wanted.removeprefix(line.split()[-1])
    for shown in typed_at(shell("zsh"), [begin, f"{line}\t"], env, tmp_path):
        after = shown.rpartition(line)[2]
        if line in shown and after.startswith(rest):
            return
    raise AssertionError(shown)
