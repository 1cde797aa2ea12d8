"""A key that a file names twice is refused wherever people write YAML."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from uvcc_console.federation import site_policy
from uvcc_console.fleet import inventory
from uvcc_console.plan import profile
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.parsing import yaml_text
from uvcc_engine.data import schema
from uvcc_engine.train import config

READERS: list[Callable[[Path], object]] = [
    site_policy.load,
    profile.read,
    inventory.read_hosts,
    schema.load_schema,
    lambda path: config.load(str(path)),
]


@pytest.mark.parametrize("read", READERS)
def test_the_first_of_two_is_not_dropped_in_silence(read: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "it.yaml"
    path.write_text("reveal: [loss]\nmodels: [a]\nreveal: [loss, weights]\n")
    with pytest.raises(UvccError, match=r"'reveal' stands twice.*line 3"):
        read(path)


@pytest.mark.parametrize(
    "text", ["{a: 1, a: 1}", "x:\n  - {b: 1, c: 2, b: 3}", "a: &k {b: 1}\nd: {<<: *k, c: 1, c: 2}"]
)
def test_at_every_depth(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="stands twice"):
        yaml_text.load(text)


def test_an_hour_and_a_half_is_not_ninety() -> None:
    """YAML 1.1 reads 1:30 to the base of sixty."""
    assert yaml_text.load("[1:30, -1:30, 1:30.5, 0x1F, 12, 1.5, -.inf]") == [
        "1:30",
        "-1:30",
        "1:30.5",
        31,
        12,
        1.5,
        -math.inf,
    ]


def test_what_is_merged_in_may_be_overridden() -> None:
    assert yaml_text.load("a: &k {b: 1, c: 2}\nd: {<<: *k, c: 3}\ne: *k")["d"] == {"b": 1, "c": 3}
    assert yaml_text.load("1: a\n'x': b\nn: null") == {1: "a", "x": "b", "n": None}


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 5_000, "nested too deeply"),
        ("a: 1\nsteps: " + "9" * 5_000, "no such value: .* line 2"),
        ("a: 1\nday: 2020-13-45", "no such value: month must be in 1..12.* line 2"),
        ("x: !!bool maybe", "no such value.* line 1"),
        ("x: !!timestamp z", "no such value.* line 1"),
        ("x: !!set [1]", "no such value"),
        ("x: 0x_", "no such value.* line 1"),
        ("&a [*a]", "unfold to more than 1,000,000 values"),
        (BOMB, "unfold to more than 1,000,000 values"),
    ],
)
def test_whatever_cannot_be_read_is_yaml_s_own_error(text: str, why: str) -> None:
    """Readers expect no other: a number too long ended a verb with a traceback, and a bomb of aliases not at all."""
    with pytest.raises(yaml.YAMLError) as told:
        yaml_text.load(text)
    assert re.search(why, " ".join(str(told.value).split()))


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("text", ["[" * 5_000, "reveal: " + "9" * 5_000, BOMB])
def test_every_reader_names_the_file(read: Callable[[Path], object], text: str, tmp_path: Path) -> None:
    path = tmp_path / "it.yaml"
    path.write_text(text)
    with pytest.raises(UvccError, match=r"it\.yaml"):
        read(path)


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_text_or_far_too_large_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    """A program or a checkpoint that was named by mistake: no traceback, and nothing of its size in memory."""
    program, huge = tmp_path / "program.yaml", tmp_path / "huge.yaml"
    program.write_bytes(b"\x7fELF\x02\x01\x01\xd0")
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    for path in (program, huge):
        with pytest.raises(UvccError, match=re.escape(str(path))):
            read(path)


ELSEWHERE = """
import sys
from pathlib import Path
from uvcc_console.fleet.inventory import read_hosts
from uvcc_engine.train import config
hosts, written = Path(sys.argv[1]), Path(sys.argv[2])
print(ascii(read_hosts(hosts)[0].region), ascii(config.load(str(written))["train"]["project"]))
"""


def test_the_locale_does_not_matter_to_what_a_file_says(tmp_path: Path) -> None:
    """Files of a colleague, in UTF-8, on a machine whose locale is another one."""
    hosts, written = tmp_path / "hosts.yaml", tmp_path / "config.yaml"
    hosts.write_text("hosts: [{host: 127.0.0.1, user: me, region: Zürich}]", encoding="utf-8")
    written.write_text("train: {project: Zürich}", encoding="utf-8")
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, hosts, written], env=env, capture_output=True, text=True, timeout=300
    )
    assert (found.stdout, found.stderr) == (r"'Z\xfcrich' 'Z\xfcrich'" + "\n", "")
