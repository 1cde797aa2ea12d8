"""Series: a shared, append-only line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from uvcc_console.core.series import Series


def test_appending_leaves_older_versions_as_they_were() -> None:
    a = Series().append(1, 10).append(2, 20)
    b = a.append(3, 30)
    c = a.append(3, 99)
    assert list(a) == [(1, 10), (2, 20)]
    assert list(b) == [(1, 10), (2, 20), (3, 30)]
    assert list(c) == [(1, 10), (2, 20), (3, 99)]


def test_truncated_goes_back_to_a_step() -> None:
    s = Series().append(1, 1).append(2, 2).append(3, 3)
    assert list(s.truncated(2)) == [(1, 1)]
    assert s.truncated(9) is s
    assert list(s) == [(1, 1), (2, 2), (3, 3)]


def test_a_point_that_is_reached_again_takes_its_successors_back() -> None:
    s = Series().append(1, 1).append(2, 2).append(3, 3)
    assert list(s.reaching(4, 9)) == [(1, 1), (2, 2), (3, 3), (4, 9)]
    assert list(s.reaching(2, 9)) == [(1, 1), (2, 9)]
    assert list(s.reaching(0, 9)) == [(0, 9)]
    assert list(s) == [(1, 1), (2, 2), (3, 3)]


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100))))
def test_behaves_like_a_list(ops: list[tuple[bool, float]]) -> None:
    """Branching histories: any version equals the plain list built the same way."""
    versions: list[tuple[Series, list[tuple[float, float]]]] = [(Series(), [])]
    for i, (branch, y) in enumerate(ops):
        s, model = versions[len(versions) // 2 if branch else -1]
        versions.append((s.append(float(i), y), [*model, (float(i), y)]))
    for s, model in versions:
        assert list(s) == model
        assert s.last == (model[-1] if model else None)
