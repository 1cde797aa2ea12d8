"""The manual's table of adversaries says what the code does: each row is held to a fact, none is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from uvcc_console.plan.plan import make_plan, operation_of
from uvcc_console.plan.profile import load
from uvcc_console.runs import domain
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.terms.operation import ONE_OPERATOR, SEALED, THREE_DOMAINS, Operation

ROOT = Path(__file__).parents[1]
VERDICTS = {"protected", "reads", "bends"}


def _table(name: str) -> dict[str, list[str]]:
    """Adversary -> what becomes of each asset."""
    text = (ROOT / "docs" / "security" / "index.md").read_text()
    block = text[text.index(f"<!-- {name}") : text.index(f"<!-- /{name}")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in rows[2:]}


@pytest.fixture(scope="module")
def table() -> dict[str, list[str]]:
    """Where one operator drives all three domains."""
    return _table("adversaries")


@pytest.fixture(scope="module")
def apart() -> dict[str, list[str]]:
    """Where each domain has a conductor of its own."""
    return _table("apart")


def _row(table: dict[str, list[str]], word: str) -> list[str]:
    (found,) = [cells for who, cells in table.items() if word in who]
    return [re.split(r"[,:; ]", cell)[0] for cell in found]


@pytest.mark.parametrize("name", ["adversaries", "apart"])
def test_every_cell_is_one_of_three_verdicts(name: str) -> None:
    table = _table(name)
    assert len(table) >= 8
    assert {cell for who in table for cell in _row(table, who)} <= VERDICTS
    assert {len(cells) for cells in table.values()} == {4}


def test_only_where_each_domain_conducts_nobody_holds_every_key(
    table: dict[str, list[str]], apart: dict[str, list[str]]
) -> None:
    one, three = Operation.of(Topology()), Operation.of(Topology(), apart=True)
    assert (one.operators, three.operators) == (ONE_OPERATOR, THREE_DOMAINS)
    assert [who for who in table if "operator of all" in who] != []
    assert [who for who in apart if "operator of all" in who] == []
    assert _row(apart, "its operator included") == ["protected"] * 4  # shown by tests/console/federation
    assert _row(apart, "two domains together")[:3] == ["reads"] * 3
    assert _row(apart, "three domains together") == ["reads", "reads", "reads", "bends"]


def test_both_modes_say_the_same_of_who_is_in_both(table: dict[str, list[str]], apart: dict[str, list[str]]) -> None:
    for word in (
        "one domain that lies",
        "two domains together",
        "the relay",
        "one party's own pods",
        "the same for two",
    ):
        assert _row(table, word) == _row(apart, word)


def test_the_operator_holds_every_key_and_the_table_says_so(table: dict[str, list[str]], tmp_path: Path) -> None:
    names = domain.order_keys(tmp_path)  # what a rollout does on one machine
    private = [p for p in tmp_path.rglob("*") if p.is_file() and b"PRIVATE KEY" in p.read_bytes()]
    held = set(names) == {"operator", "P0", "P1", "P2"} and len(private) == len(names)
    one = Operation.of(Topology()).operators == ONE_OPERATOR
    assert held == one == ("protected" not in _row(table, "the operator of all three domains"))


def test_traffic_inside_a_party_is_told_as_the_policy_states_it(table: dict[str, list[str]]) -> None:
    sealed = Operation.of(Topology(replicas=2)).party_traffic == SEALED
    assert sealed == (_row(table, "one party's own pods") == ["protected"] * 4)  # tests/engine/parallel/test_capture
    assert sealed == (_row(table, "the same for two parties") == ["protected"] * 4)


def test_two_domains_read_what_one_cannot(table: dict[str, list[str]]) -> None:
    assert _row(table, "follows the protocol") == ["protected"] * 4
    assert _row(table, "two domains together")[:3] == ["reads"] * 3


def test_the_security_page_gives_the_operator_no_bounds() -> None:
    (line,) = [x for x in (ROOT / "SECURITY.md").read_text().splitlines() if x.startswith("| the operator of all")]
    _, _, _, cannot, can, _ = line.split("|")
    assert cannot.strip() == ""
    assert "owner's key" in can


def test_a_plan_says_who_could_look() -> None:
    name, profile = load("demo")
    said = operation_of(make_plan("r", name, profile))
    assert any("could look at everything" in sentence for sentence in said)
