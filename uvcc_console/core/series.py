"""A numeric series that many snapshots can share: appending is O(1) and older versions stay valid."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_bare = object.__new__


class Series:
    """Pairs (x, y) of floats. ``append`` returns a new Series; the buffers are shared until histories diverge."""

    __slots__ = ("_n", "_xs", "_ys")

    def __init__(self, xs: array[float] | None = None, ys: array[float] | None = None, n: int = 0) -> None:
        self._xs = xs if xs is not None else array("d")
        self._ys = ys if ys is not None else array("d")
        self._n = n

    def append(self, x: float, y: float) -> Series:
        """One more point; a history that went on from here keeps its own."""
        n, xs, ys = self._n, self._xs, self._ys
        if n != len(xs):
            xs, ys = xs[:n], ys[:n]
        xs.append(x)
        ys.append(y)
        made = _bare(Series)  # many times for every step of every worker
        made._xs, made._ys, made._n = xs, ys, n + 1
        return made

    def grow(self, x: float, y: float) -> bool:
        """Take one more point in place; False, and nothing is done, where it does not come after all the others.

        Only for who made this version and has shown it to nobody yet.
        """
        n, xs = self._n, self._xs
        if n != len(xs) or (n and xs[n - 1] >= x):
            return False
        self._ys.append(y)
        xs.append(x)
        self._n = n + 1
        return True

    def reaching(self, x: float, y: float) -> Series:
        """The same, without what stood at or after ``x`` (a resume goes back to its checkpoint)."""
        n = self._n
        return (self if not n or self._xs[n - 1] < x else self.truncated(x)).append(x, y)

    def truncated(self, x: float) -> Series:
        """Without every point at or after ``x``."""
        n = self._n
        while n and self._xs[n - 1] >= x:
            n -= 1
        return Series(self._xs[:n], self._ys[:n], n) if n != self._n else self

    @property
    def last(self) -> tuple[float, float] | None:
        return (self._xs[self._n - 1], self._ys[self._n - 1]) if self._n else None

    def xs(self) -> array[float]:
        return self._xs[: self._n]

    def ys(self) -> array[float]:
        return self._ys[: self._n]

    def recent(self, n: int) -> array[float]:
        """The last ``n`` values of y."""
        return self._ys[max(0, self._n - n) : self._n]

    def recent_xs(self, n: int) -> array[float]:
        """The last ``n`` values of x."""
        return self._xs[max(0, self._n - n) : self._n]

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return ((self._xs[i], self._ys[i]) for i in range(self._n))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Series) and self.xs() == other.xs() and self.ys() == other.ys()

    def __hash__(self) -> int:
        return hash((self._n, self.last))
