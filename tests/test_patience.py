"""No verdict depends on how fast the machine is: a limit of time that only ends a failure is minutes.

It costs nothing where the thing works. What is meant to run out is below a second, or a clock that the test moves; a
limit in between is what a machine of CI missed now and then.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from parsed import EVERY_TEST, TESTS, nodes_of

LEAST_S: Final = 100.0
MEANT_S: Final = 1.0  # below it a limit is meant to run out, or is a pause between two looks
AT: Final = {"wait": 0, "join": 0, "result": 0, "settimeout": 0, "wait_for": -1, "create_connection": -1}
"""By the name of a call: which argument is its limit; every call's ``timeout`` is one, too."""
LISTED: Final = {
    # whoever floods or hangs on purpose
    "engine/plane/stranger.py": {"settimeout"},
    "engine/relay/relay_flood.py": {"create_connection"},
    # what is expected is that nothing comes
    "engine/plane/test_plane_flood.py": {"settimeout"},
    "engine/relay/test_relay_bounds.py": {"settimeout"},
    # a pause, in which something breaks
    "engine/parallel/test_parallel_faults.py": {"wait"},
    # what has not ended by itself by then is ended
    "browser.py": {"monotonic"},
    "console/fleet/slurmd.py": {"monotonic"},
    # a blow for which there is nobody is not struck
    "console/fleet/chaoslife.py": {"monotonic"},
    # a server that never answers, until its test is over
    "transparency_log.py": {"wait"},
}


def _number(node: ast.expr | None) -> float:
    """What a number stands for; nothing that a limit can be where it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    return 0.0


def short_limits(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of each call, or end, with a limit that is neither meant to run out nor minutes."""
    for node in nodes:
        left = node.left if isinstance(node, ast.BinOp) else None
        ends = isinstance(left, ast.Call) and ast.unparse(left) == "time.monotonic()"
        if isinstance(node, ast.BinOp) and ends and MEANT_S <= _number(node.right) < LEAST_S:
            yield node.lineno, "monotonic"
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        limits = [k.value for k in node.keywords if k.arg == "timeout"]
        if name == "timeout" and ast.unparse(node.func) == "asyncio.timeout":
            limits += node.args
        elif name in AT and len(node.args) > max(0, -1 - AT[name]) and not isinstance(node.func, ast.Name):
            limits.append(node.args[AT[name]])
            limits += node.args[1:3] if name == "wait" else []  # a condition is waited for, at most so long
        if any(MEANT_S <= _number(limit) < LEAST_S for limit in limits):
            yield node.lineno, name


def test_a_limit_that_only_ends_a_failure_is_minutes() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line} {name}"
        for path in EVERY_TEST
        for line, name in short_limits(nodes_of(path))
        if name not in LISTED.get(str(path.relative_to(TESTS)), set())
    ]
    assert found == []


def test_short_limits_are_found_and_what_is_meant_is_not() -> None:
    text = (
        "done.wait(20)\nbus.wait(met, 20.0)\nawait asyncio.wait_for(work, 30.0)\nsubprocess.run(command, timeout=60)\n"
        "async def f():\n    async with asyncio.timeout(10):\n        pass\n"
        "end = time.monotonic() + 30.0\nlater = time.monotonic() + 300\n"
        "pause.wait(0.02)\ndone.wait(120)\nprocess.wait()\n', '.join(words)\nlink.run('hang', timeout=0.1)\n"
    )
    found = [name for _, name in short_limits(ast.walk(ast.parse(text)))]
    assert sorted(found) == ["monotonic", "run", "timeout", "wait", "wait", "wait_for"]
