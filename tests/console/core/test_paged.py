"""A mapping in pages is what a dict is, never changes, and makes folding a step grow with its workers alone."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uvcc_console.core.folding.reducing import LARGE, put
from uvcc_console.core.paged import PAGE, PagedMapping


@given(
    first=st.dictionaries(st.integers(0, 400), st.integers(), max_size=300),
    entries=st.lists(st.tuples(st.integers(0, 400), st.integers()), max_size=200),
)
def test_it_is_a_dict_that_keeps_every_version(first: dict[int, int], entries: list[tuple[int, int]]) -> None:
    versions, plain = [PagedMapping(first)], [dict(first)]
    for key, value in entries:
        versions.append(versions[-1].with_entry(key, value))
        plain.append({**plain[-1], key: value})
    for paged, one in zip(versions, plain, strict=True):
        assert list(paged.items()) == list(one.items())
        assert list(paged.values()) == list(one.values())
        assert list(paged) == list(one)
        assert (paged, len(paged)) == (one, len(one))
        assert all(paged[key] == one[key] and paged.get(key) == one[key] for key in one)
        assert 999 not in paged
        with pytest.raises(KeyError):
            paged[999]


def test_one_page_is_copied_and_the_others_are_shared() -> None:
    before = PagedMapping({k: [k] for k in range(10 * PAGE)})
    after = before.with_entry(3 * PAGE + 1, [-1])
    shared = sum(a is b for a, b in zip(before.pages, after.pages, strict=True))
    assert shared == 9
    assert after.places is before.places


def test_a_mapping_that_grows_large_is_kept_inpages() -> None:
    mapping = MappingProxyType({})
    for k in range(LARGE + 2):
        mapping = put(mapping, k, k)
        assert isinstance(mapping, PagedMapping) == (k >= LARGE)
    assert mapping == {k: k for k in range(LARGE + 2)}
    assert put(mapping, 7, -7)[7] == -7
    assert mapping[7] == 7
