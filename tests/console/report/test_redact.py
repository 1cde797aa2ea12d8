"""What the redactor misses and where it cries wolf, measured over a corpus; and that it stays linear."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leaks import EACH, LEAKS, innocent, leaks

from uvcc_console.report import redact
from uvcc_console.report.logbundle import QUOTED, UNQUOTED, find_logs, write_bundle
from uvcc_console.report.redact import (
    KEY,
    SHARE,
    LeakScanner,
    RedactionError,
    checked,
    checked_as_shown,
    lines_of,
    secret_kind,
)
from uvcc_engine.contract.text import clean_block

SIGN = st.sampled_from(("", "", "", "", "\x1b[1m", "\u200b", "\x07"))
QUIET = "2026-11-22 03:32:30,382 INFO step {n} of 60, loss 0.{n}, 3 of 3 parties"


def found_in(lines: list[str]) -> str:
    sieve = LeakScanner("x")
    return next((s for line in lines if (s := sieve.shape(line))), "")


def in_a_log(leak: str) -> list[str]:
    """A leak in the midst of what a worker writes."""
    return [*(QUIET.format(n=n) for n in range(5)), *leak.split("\n"), *(QUIET.format(n=n) for n in range(5))]


def test_of_every_kind_of_leak_none_is_missed_and_no_innocent_log_is_refused(
    record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    missed = {kind: [x for x in leaks(kind) if not found_in(in_a_log(x))] for kind in LEAKS}
    logs = innocent()
    lines = sum(map(len, logs.values()))
    refused = {name: shape for name, log in logs.items() if (shape := found_in(log))}
    total, count = EACH * len(LEAKS), sum(map(len, missed.values()))
    with capsys.disabled():
        print(f"\nredactor: {count} of {total} leaks of {len(LEAKS)} kinds missed ({count / total:.2%}),", end=" ")
        print(f"{len(refused)} of {len(logs)} innocent logs of {lines} lines refused ({len(refused) / len(logs):.2%})")
    record_property("missed", count)
    assert {kind: len(m) for kind, m in missed.items() if m} == {}, [m[0] for m in missed.values() if m]
    assert refused == {}


def test_the_logs_of_a_run_raise_no_false_alarm(run_dir: Path) -> None:
    """Everything that a bundle quotes, and what it leaves out only because it is evidence for tools."""
    write_bundle(run_dir)
    logs = find_logs(run_dir / "artifacts")
    assert sum(log.quoted for log in logs) > 10
    for log in logs:
        with log.path.open(errors="replace", newline="\n") as file:
            if log.quoted or log.name.endswith(("roots.jsonl", "policy.json", "signers", "SUMS")):
                for _ in checked(log.name, lines_of(file)):
                    pass
    assert not set(QUOTED) & set(UNQUOTED)


def test_the_same_value_is_a_key_or_a_hash_by_its_name() -> None:
    value = random.Random(3).randbytes(32).hex()
    for line in (value, f"key: {value}", f"share_root_key {value}", f"0x{value}", f'"seed": "{value}"'):
        assert secret_kind(line) == KEY, line
    for line in (
        f"root: {value}",
        f'"result_hash":"{value}"',
        f"sha256 {value}",
        f"{value}  leaves.bin",
        f"sid {value}",
    ):
        assert secret_kind(line) == "", line


def test_a_run_that_went_on_under_another_policy_can_be_handed_over() -> None:
    """It names the policy before it as ``of``; the word says nothing of a value that only stands behind it."""
    value = os.urandom(32).hex()
    told = f"info taken_over step=120 of={value} commit={value}"
    for line in (f"job.start.of: {value}", told, f'  "of": "{value}",', f'{{"start":{{"of":"{value}","step":60}}}}'):
        assert not secret_kind(line), line
    for line in (f"the half of {value}", f"job.start.of.it: {value}", f"of {value}", f"roof: {value}"):
        assert secret_kind(line), line


def test_a_list_takes_the_name_it_was_opened_under() -> None:
    values = [random.Random(n).randbytes(32).hex() for n in range(3)]
    for name, wanted in (("commitments", ""), ("seeds", KEY), ("things", KEY)):
        text = json.dumps({name: values}, indent=1)
        assert found_in(text.splitlines()) == wanted, name


def test_a_run_that_goes_on_behind_the_end_of_a_line_is_put_together() -> None:
    text = base64.b64encode(random.Random(1).randbytes(110)).decode()
    assert found_in([text[:76], text[76:]]) == SHARE
    assert found_in([text[:76]]) == ""
    assert found_in([f'"{text[:76]}\\n{text[76:]}"']) == SHARE
    dump = random.Random(1).randbytes(90).hex()
    assert found_in([dump[:60], dump[60:120], dump[120:]]) == SHARE


def test_what_is_spread_over_a_window_is_added_up_and_what_is_far_apart_is_not() -> None:
    r = random.Random(5)
    numbers = [str(r.randrange(2**62, 2**63)) for _ in range(4)]
    assert found_in([x for n in numbers for x in (n, QUIET.format(n=1))]) == SHARE
    assert found_in([x for n in numbers for x in (n, *[QUIET.format(n=1)] * redact.WINDOW)]) == ""


@pytest.mark.parametrize("what", ["key", "numbers", "base64"])
def test_a_line_without_end_is_read_in_parts_and_nothing_hides_at_the_seams(what: str) -> None:
    secret = {
        "key": 'private_key="' + "0123456789abcdef" * 3 + '"',
        "numbers": " ".join(str(random.Random(2).randrange(2**62, 2**63)) for _ in range(6)),
        "base64": base64.b64encode(random.Random(2).randbytes(300)).decode(),
    }[what]
    for at in range(redact.LONGEST - 2 * len(secret), redact.LONGEST + 40, 37):
        parts = list(lines_of(io.StringIO("a " * (at // 2) + secret + " b" * 50_000)))
        assert max(map(len, parts)) <= redact.LONGEST
        assert found_in(parts), (what, at)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_shown_is_looked_at_as_if_it_were_another_file(data: st.DataObject) -> None:
    parts = [
        *(QUIET.format(n=n) for n in range(9)),
        *(line for kind in LEAKS for line in next(iter(leaks(kind))).split("\n")),
    ]
    line = st.sampled_from(parts).flatmap(
        lambda text: st.integers(0, len(text)).map(lambda at: text[:at] + data.draw(SIGN) + text[at:])
    )
    lines = data.draw(st.lists(line, max_size=30))
    try:
        wanted = list(checked("x", (clean_block(raw) for raw in checked("x", lines))))
    except RedactionError:
        wanted = None
    try:
        found = list(checked_as_shown("x", lines))
    except RedactionError:
        found = None
    assert found == wanted


def test_signatures_pass_only_as_long_as_signatures_are() -> None:
    body = base64.b64encode(random.Random(4).randbytes(6000)).decode()
    rows = [body[i : i + 70] for i in range(0, len(body), 70)]
    assert found_in(["-----BEGIN SSH SIGNATURE-----", *rows[:5], "-----END SSH SIGNATURE-----"]) == ""
    assert found_in(["-----BEGIN SSH SIGNATURE-----", *rows]) == SHARE
    assert found_in(["-----BEGIN SSH SIGNATURE-----", body]) == SHARE
    assert found_in(["-----END SSH SIGNATURE-----", *rows[:5]]) == SHARE


HARD = {
    "names": "a_" * 50_000,
    "jwt heads": "-eyJ" * 25_000,
    "signature heads": "-----BEGIN SSH SIGNATURE-----" * 3_000,
    "brackets": "[" * 100_000,
    "numbers": "[" + "1 " * 50_000,
    "digits": "1" * 100_000,
    "hex": "0x" * 50_000,
    "bytes": "\\x41" * 25_000,
    "spaces": "secret" + " " * 100_000,
    "dots": "1." * 50_000,
    "base64": "aA1" * 33_000,
    "keys": "key:" * 25_000,
    "tables": "|1" * 50_000,
    "exponents": "1e+1" * 25_000,
    "pairs": "ab " * 33_000,
}


@pytest.mark.parametrize(
    "what", [pytest.param(value, marks=pytest.mark.ci(__file__) if n % 4 != 2 else ()) for n, value in enumerate(HARD)]
)
def test_no_line_makes_it_slow(what: str) -> None:
    def took(text: str) -> float:
        begin = time.process_time()
        found_in(list(lines_of(io.StringIO(text))))
        return time.process_time() - begin

    # the least of three each: what else a machine does lengthens processor time, too, and never shortens it
    longer, once = (min(took(text) for _ in range(3)) for text in (HARD[what] * 10, HARD[what]))
    assert longer < 20 * max(once, 0.02)
    assert longer < 10  # a megabyte


@pytest.mark.ci(__file__)
def test_a_large_log_takes_bounded_memory_and_linear_time(tmp_path: Path) -> None:
    import tracemalloc

    block = "\n".join(line for log in innocent().values() for line in log) + "\n"

    def took(times: int) -> float:
        path = tmp_path / "log"
        path.write_text(block * times)
        begin = time.process_time()
        with path.open(newline="\n") as file:
            for _ in checked("log", lines_of(file)):
                pass
        os.unlink(path)
        return time.process_time() - begin

    small, large = (min(took(times) for _ in range(3)) for times in (2, 8))
    assert large < 8 * small
    tracemalloc.start()
    took(4)
    peak = tracemalloc.get_traced_memory()[1] - len(block) * 4
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_refusal_names_the_place_and_never_the_value() -> None:
    lines = [QUIET.format(n=1), "tensor([-1234567890123456789,  987654321098765432, 1111111111111111111])"]
    with pytest.raises(RedactionError) as caught:
        list(checked("full/p0r0/worker.log", lines))
    assert "full/p0r0/worker.log:2 is share-shaped" in str(caught.value)
    assert "1234567890123456789" not in str(caught.value)


def test_what_is_no_file_cannot_be_left_out() -> None:
    with pytest.raises(RedactionError) as quoted:
        list(checked("(handoff)", ["seed: " + os.urandom(32).hex()]))
    assert "--exclude" not in str(quoted.value)
    with pytest.raises(RedactionError, match=r"--exclude a\.log leaves the file out"):
        list(checked("a.log", ["seed: " + os.urandom(32).hex()]))


def test_prices_of_a_large_fleet_are_no_shares() -> None:
    quote = ", ".join(f'"uvcc-large-p{n % 3}r{n // 3} local {n}.07 $/h"' for n in range(24))
    assert secret_kind(f'{{"pods": [{quote}]}}') == ""
    assert secret_kind(f'[2026-11-22T07:53:02.100Z] EVENT quote {{"pods": [{quote}]}}') == ""
    assert secret_kind(f'{{"pods": [{quote.replace(" $/h", "")}]}}') == SHARE
