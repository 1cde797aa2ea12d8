"""The figures and words of the manual's page on domains are those of the code, wherever a sentence gives one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from uvcc_console.cli import main as cli
from uvcc_console.federation import domain_key
from uvcc_console.federation.owner_results import DOCUMENTS
from uvcc_console.federation.proposing import SEALED_TO_OWNER
from uvcc_console.plan.profile import load
from uvcc_console.rollout.federated import consenting, peers
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.job.private_job import STANDARDISED_LEAST, STANDARDISED_LIMIT, STANDARDISED_ROWS
from uvcc_engine.contract.peer_protocol.record_names import (
    APPROVALS,
    BARRIERS,
    OWNER_SHARES,
    PROPOSALS,
    REPORTS,
    ROSTERS,
)
from uvcc_engine.model.learning import standardising
from uvcc_engine.owner import key_tags
from uvcc_engine.relay.relay_roles import SCOPES, Role
from uvcc_engine.transcript.proof.input_attribution import OWNERS_FILE

PAGE: Final = Path(__file__).parents[1] / "docs" / "security" / "domains.md"
TEXT: Final = " ".join(PAGE.read_text(encoding="utf-8").split())
SECONDS: Final = {2.0: "two seconds"}


def says(sentence: str) -> bool:
    return " ".join(sentence.split()) in TEXT


def test_figures_are_those_of_the_code() -> None:
    assert (
        domain_key.fingerprint(
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIC5VgfV06U6fK/Puw7lTBd4MpWeROpHx2G6Ictt9Ejgp"
        ).count(" ")
        == 5
    )
    assert says("thirty digits to compare by voice")
    assert says(f"A conductor signs a sign of life every {SECONDS[peers.REPORT_S]}")
    assert says(f"There are {STANDARDISED_LEAST} to 2^{STANDARDISED_ROWS.bit_length() - 1} training rows")
    assert says(f"A feature is at most {STANDARDISED_LIMIT:.0f} in size")
    assert says(f"between its quantiles of {standardising.QUANTILES[0]} and {standardising.QUANTILES[1]}")
    assert says("to the next lower 2^-10")
    found = standardising.ClearStatistics.of(np.array([[0.0015], [1.0]]), "range")
    assert found.mean.tolist() == [2.0**-10]
    assert says(f"cut to {key_tags.TAG_BYTES} bytes")
    assert says(f"up to a power of two ({key_tags.FEWEST_TAGS} at least)")


@pytest.mark.parametrize(("rows", "told"), [(0, 256), (256, 256), (257, 512), (1000, 1024)])
def test_a_list_of_tags_tells_how_many_rows_there_are_up_to_a_power_of_two(rows: int, told: int) -> None:
    tags = [n.to_bytes(key_tags.TAG_BYTES, "big") for n in range(rows)]
    body = key_tags.packed(tags)
    assert len(body) == told * key_tags.TAG_BYTES
    assert set(tags) <= key_tags.unpacked(body, "owner 1")
    assert says("an owner's number of rows, up to the next power of two | the other owners, the relay")


def test_who_reads_what_of_a_federated_run_is_what_a_relay_lets_in() -> None:
    rows = (PAGE.parent / "leaks.md").read_text(encoding="utf-8").splitlines()
    told = {row.split("|")[1]: row.split("|")[2] for row in rows if row.startswith("| in a federated run")}
    for word, records, roles in (
        ("the proposal", (PROPOSALS, APPROVALS, ROSTERS), "party owner coordinator auditor"),
        ("stage and step", (BARRIERS, REPORTS), "party coordinator auditor"),
        ("how many rows", (OWNER_SHARES,), "party auditor"),
    ):
        (whom,) = [found for what, found in told.items() if word in what]
        for role in ("party", "owner", "coordinator", "auditor"):
            reads = all(name.startswith(SCOPES[Role(role)].reads) for name in records)
            assert reads == (role in roles.split()), (word, role)
            while_it_goes_on = whom.partition(";")[0]
            assert reads == ({"party": "domains"}.get(role, role) in while_it_goes_on), (word, role)
    assert {"barriers.json", "owner-shares.json"} <= set(DOCUMENTS)  # what owners get with their results


def test_words_are_those_that_the_commands_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert says("also: full, terminate")
    assert set(consenting.KINDS) == {"full", "resume", "terminate"}
    for key in ("resume", "full", "terminate"):
        assert says(f"`consent.{key}`")
    assert says("`statistics.npz`")
    assert owner_files.STATISTICS == "statistics.npz"
    assert {"weights", "statistics"} <= set(SEALED_TO_OWNER)
    assert says(f"(`{OWNERS_FILE}`)")
    (block,) = re.findall(r"```yaml\n(job:\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "joined.yaml").write_text(
        block.replace("job:\n", "# as on the page\njob:\n  kind: private\n  steps: 1\n  batch: 8\n  lr: 0.1\n")
    )
    _, profile = load(str(tmp_path / "joined.yaml"), [])
    assert profile.job.join is not None
    assert profile.job.join.outputs == 2
    assert ColumnJoin.of_job({"join": profile.job.join.model_dump(exclude={"outputs"})}) is not None
    for form in ("text", "exact", "number"):
        assert says(f"`{form}`")
    for verb in re.findall(
        r"uvcc (owner \w+|domain \w+|join|propose|proposals|verify|rollout|resume|teardown)\b", TEXT
    ):
        with pytest.raises(SystemExit) as done:
            cli.main([*verb.split(), "--help"])
        assert done.value.code == 0, verb
    assert "usage" in capsys.readouterr().out.lower()


def test_numbers_as_keys_are_compared_as_the_page_says() -> None:
    def same(form: str, one: str, other: str) -> bool:
        join = ColumnJoin.of_job({"join": {"key": "k", "columns": [1, 1], "label": 0, "form": form}})
        assert join is not None
        return key_tags.comparable(one, join) == key_tags.comparable(other, join)

    assert says("`number` as whole numbers, so that 007 is 7")
    assert same("number", "007", "7")
    assert says("without case, in Unicode's compatible form, with each run of blanks as one")
    assert same("text", "Ärzte  GmbH", "ärzte gmbh")
    assert same("text", "ﬁne", "FINE")  # a ligature
    assert says("`exact` as they stand")
    assert not same("exact", "a b", "A b")
