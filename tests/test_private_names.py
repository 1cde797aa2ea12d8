"""Tests use what is public: what they must reach into is listed here, with the reason.

A name with a leading underscore belongs to its module or class. A test that needs it shows that it ought to be public,
or that there is no public way to bring about what the test is for; the second kind is listed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from parsed import EVERY_TEST, TESTS, nodes_of

EVERYWHERE: Final = frozenset(
    {
        "_replace",  # of a named tuple: public in spite of its name
        "_exit",  # os._exit: the end of a forked child
        "_getframe",  # sys._getframe
        "_int_mm",  # torch's own, which the kernels call: a processor that saturates is imitated
        "_actions",  # argparse's: the options of a parser
        "_schema",  # torch's own description of an operator
        "_compositor",  # textual's: what the screen shows, for snapshots of odd texts
        "_notifications",  # textual's: what was told at the corner
        "_exit_renderables",  # textual's: what is printed after the screen closed
        "_post_mouse_events",  # textual's pilot: a wheel has no public way
        "_transport",  # asyncssh's: a connection is cut, not closed
    }
)
LISTED: Final[dict[str, frozenset[str]]] = {
    # hypothesis's: there is no public way to keep numbers of whatever sources are imported out of the cases
    "conftest.py": frozenset({"_get_local_constants", "_local_constants"}),
    # pytest's: there is no public way to rewrite a file's assertions before pytest's workers start
    "rewritten.py": frozenset({"_rewrite_test", "_write_pyc"}),
    # a process that is killed, a link that is cut: the plane's own thread and link, which no caller may touch
    "engine/plane/plane_kit.py": frozenset({"_lock", "_background", "_closed", "_link"}),
    "engine/plane/test_plane_auto.py": frozenset({"_lock", "_link", "_adopt", "_direct"}),
    "engine/plane/test_plane_nudge.py": frozenset({"_lock", "_link", "_poll", "_background_round"}),
    # that the poll looks at what the link has, and at nothing else: no behaviour shows a number that is left in it
    "engine/plane/test_plane_poll.py": frozenset(
        {"_active", "_by_fd", "_dirty", "_guests", "_listener", "_lobby", "_poll", "_wake"}
    ),
    # what comes home from pods, and what ends there: there are no pods, and what is shown is the record between
    "console/rollout/test_private_migration.py": frozenset({"_evidence", "_end_relays"}),
    # patience that is cut short once all have met: as a setting it would also bound how long they take for that
    "engine/plane/test_relay_locator.py": frozenset({"_waits"}),
    "engine/plane/test_plane_live.py": frozenset({"_waits"}),
    "engine/parallel/test_capture.py": frozenset({"_timeout_s"}),
    "engine/parallel/test_groups.py": frozenset({"_timeout_s"}),
    # hostile bytes behind the seals: handed to the inner parsers, which no peer reaches unsealed
    "engine/plane/test_plane_fuzz.py": frozenset(
        {"_acks", "_arrivals", "_handshake", "_mac", "_notices", "_pieces", "_refused"}
    ),
    # what a flood may cost: counters and bounds that nothing outside may see
    "engine/plane/test_plane_flood.py": frozenset(
        {"_agree", "_counts", "_endpoints", "_link", "_lobby", "_lock", "_open", "_rejections", "_seen", "_take_in"}
    ),
    # known defects are put back in, to show that the model test finds them
    "engine/plane/test_plane_model.py": frozenset(
        {"_acknowledge", "_deliver", "_fast_retransmit", "_recv_secret", "_sent"}
    ),
    # a party that cheats sends what an honest worker has no way to send; and when the others have waited long enough
    "engine/private/private_liars.py": frozenset({"_queue", "_judge", "_hear_from"}),
    "engine/transcript/test_damage.py": frozenset({"_outcome", "_sid"}),
    "engine/mpc/test_mpc_privacy.py": frozenset({"_at"}),
    "console/federation/test_hostile_coordinator.py": frozenset({"_draft", "_shared", "_signed"}),
    "console/federation/test_hostile_domain.py": frozenset({"_own_roster", "_roster"}),
    # the latter: that each has looked at the relay, by which the time of a test goes on
    "console/federation/test_peers.py": frozenset({"_barrier", "_own_roster", "_roster", "_changed"}),
    # whether loops are compiled, which no caller chooses
    "engine/mpc/test_mpc_kernels.py": frozenset({"_jit"}),
    # how much is kept: bounds of tables in memory and on disk
    "engine/parallel/test_unix_group.py": frozenset({"_lines"}),
    "engine/relay/test_relay_bounds.py": frozenset({"_expiry", "_waiting"}),
    "engine/transcript/test_merkle.py": frozenset({"_stack"}),
    # Triton's: what its interpreter replaces for a kernel, and the function of an exclusive or
    "engine/quick_triton.py": frozenset({"_LangPatchScope", "_xor_combine"}),
    "engine/nsa/test_quick_triton.py": frozenset({"_patch_lang", "_xor_combine"}),
    # a connection that breaks in the middle, a host that answers nothing, another's key
    "console/fleet/injections_pod.py": frozenset({"_login", "_readiness"}),
    "console/fleet/test_fleet_agent_client.py": frozenset({"_greet", "_keeper", "_read"}),
    "console/fleet/test_fleet_inventory.py": frozenset({"_host_of", "_link"}),
    "console/fleet/test_fleet_local.py": frozenset({"_base"}),
    "console/fleet/test_user_ssh.py": frozenset({"_hosts"}),
    "console/federation/test_data_owner.py": frozenset({"_key"}),
    # a sidecar that is about to be replaced, and how much of a hostile stream is held
    "console/haltd/test_halt_domain.py": frozenset({"_channels", "_relay", "_terminate", "_view"}),
    "console/rollout/test_rollout_hostile_agent.py": frozenset({"_names", "_size"}),
    # textual's: the rules of a style sheet are parsed once for all apps
    "console/ui/conftest.py": frozenset({"_parse_rules", "_variables"}),
    # how often a screen was drawn, and a row of the log that is scrolled out of sight
    "console/ui/test_ui_log.py": frozenset({"_line"}),
}


def _private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _called(node: ast.Call) -> str:
    """The last part of what is called; nothing for the value of an expression."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _own(nodes: Iterable[ast.AST]) -> set[str]:
    """What a file of tests defines itself: its own classes may keep things to themselves, too."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return found


def _reached(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """(private name, line) of everything that a file of tests, with these nodes, reaches into."""
    own = _own(nodes := tuple(nodes))
    for node in nodes:
        if isinstance(node, ast.Attribute) and _private(node.attr) and node.attr not in own:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("uvcc_"):
            yield from ((a.name, node.lineno) for a in node.names if _private(a.name))
        elif isinstance(node, ast.Call) and _called(node).endswith(("setattr", "delattr", "getattr")):
            texts = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            last = texts[0].rpartition(".")[2] if texts else ""
            if _private(last) and last not in own:
                yield last, node.lineno


def test_no_test_reaches_for_what_is_private() -> None:
    found: dict[str, list[str]] = {}
    used: dict[str, set[str]] = {}
    for path in EVERY_TEST:
        name = path.relative_to(TESTS).as_posix()
        for attribute, line in _reached(nodes_of(path)):
            if attribute in LISTED.get(name, frozenset()):
                used.setdefault(name, set()).add(attribute)
            elif attribute not in EVERYWHERE:
                found.setdefault(name, []).append(f"{line}: {attribute}")
    assert found == {}
    assert {n: sorted(names - used.get(n, set())) for n, names in LISTED.items() if names != used.get(n, set())} == {}


def test_the_scan_finds_what_it_is_for() -> None:
    for text in (
        "def test(x):\n    x._y()",
        "from uvcc_engine.relay.hub import _GONE",
        "def test(monkeypatch, hub):\n    monkeypatch.setattr(hub, '_expiry', 3)",
        "def test(monkeypatch):\n    monkeypatch.setattr('uvcc_engine.relay.hub._GONE', 3)",
    ):
        assert list(_reached(ast.walk(ast.parse(text))))
    own = "class Kit:\n    def __init__(self):\n        self._x = 1\n\ndef test(kit):\n    kit._x"
    assert not list(_reached(ast.walk(ast.parse(own))))
