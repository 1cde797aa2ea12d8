"""Merkle trees of RFC 6962 section 2.1: tree hash, inclusion proofs and consistency proofs over leaf hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


EMPTY = hashlib.sha256(b"").digest()


class TreeHasher:
    """Tree hash of a stream of leaf hashes in O(log n) memory."""

    __slots__ = ("_stack", "size")

    def __init__(self) -> None:
        self._stack: list[bytes] = []  # roots of the perfect subtrees, largest first: one per set bit of size
        self.size = 0

    def append(self, leaf: bytes) -> None:
        stack = self._stack
        size = self.size
        self.size = size + 1
        while size & 1:
            leaf = hashlib.sha256(b"\x01" + stack.pop() + leaf).digest()
            size >>= 1
        stack.append(leaf)

    def root(self) -> bytes:
        """Root of what was appended so far."""
        if not self._stack:
            return EMPTY
        root = self._stack[-1]
        for left in reversed(self._stack[:-1]):
            root = node_hash(left, root)
        return root


def tree_root(leaves: Iterable[bytes]) -> bytes:
    """Tree hash of leaf hashes."""
    tree = TreeHasher()
    for leaf in leaves:
        tree.append(leaf)
    return tree.root()


def _split(n: int) -> int:
    """The largest power of two smaller than n (n > 1)."""
    return 1 << ((n - 1).bit_length() - 1)


def _siblings(index: int, size: int) -> list[tuple[int, int]]:
    """The ranges of leaves beside the way from leaf ``index`` to the root, the largest first."""
    if not 0 <= index < size:
        raise IndexError(f"leaf {index} of {size}")
    found: list[tuple[int, int]] = []
    low, high = 0, size
    while high - low > 1:
        middle = low + _split(high - low)
        if index < middle:
            found.append((middle, high))
            high = middle
        else:
            found.append((low, middle))
            low = middle
    return found


def inclusion_proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Audit path of leaf ``index``, lowest sibling first. Raises IndexError outside the tree."""
    return inclusion_proofs(leaves, len(leaves), [index])[index]


def inclusion_proofs(leaves: Iterable[bytes], size: int, indices: Iterable[int]) -> dict[int, list[bytes]]:
    """Audit paths of several leaves of a stream of ``size`` leaf hashes, in memory that does not grow with ``size``.

    Raises IndexError outside the tree.
    """
    ways = {index: _siblings(index, size) for index in indices}
    trees = {place: TreeHasher() for way in ways.values() for place in way}
    due = sorted(trees, reverse=True)  # by where they begin
    growing: list[tuple[int, int]] = []
    for at, leaf in enumerate(leaves):
        while due and due[-1][0] == at:
            growing.append(due.pop())
        growing = [place for place in growing if place[1] > at]
        for place in growing:
            trees[place].append(leaf)
    return {index: [trees[place].root() for place in reversed(way)] for index, way in ways.items()}


def root_from_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes]) -> bytes | None:
    """The root of ``size`` leaves that ``proof`` leads to (RFC 9162 section 2.1.3.2).

    None if the proof has the wrong length.
    """
    if not 0 <= index < size:
        return None
    at, last, root = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            return None
        if at & 1 or at == last:
            root = node_hash(sibling, root)
            while at and not at & 1:
                at, last = at >> 1, last >> 1
        else:
            root = node_hash(root, sibling)
        at, last = at >> 1, last >> 1
    return root if last == 0 else None


def consistency_proof(leaves: Sequence[bytes], first: int) -> list[bytes]:
    """Proof that the tree of the first ``first`` leaves is a prefix of the tree of all. Raises IndexError."""
    if not 0 < first <= len(leaves):
        raise IndexError(f"prefix {first} of {len(leaves)}")
    path: list[bytes] = []
    low, high, complete = 0, len(leaves), True
    while first != high - low:
        middle = low + _split(high - low)
        if first <= middle - low:
            path.append(tree_root(leaves[middle:high]))
            high = middle
        else:
            path.append(tree_root(leaves[low:middle]))
            first -= middle - low
            low, complete = middle, False
    if not complete:
        path.append(tree_root(leaves[low:high]))
    return path[::-1]


def is_consistent(first: int, second: int, first_root: bytes, second_root: bytes, proof: Sequence[bytes]) -> bool:
    """True if ``proof`` shows that the first tree is a prefix of the second (RFC 9162 section 2.1.4.2)."""
    if not 0 < first <= second:
        return False
    if first == second:
        return not proof and first_root == second_root
    path = list(proof)
    if first & (first - 1) == 0:
        path.insert(0, first_root)
    if not path:
        return False
    at, last = first - 1, second - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    old = new = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if at & 1 or at == last:
            old, new = node_hash(sibling, old), node_hash(sibling, new)
            while at and not at & 1:
                at, last = at >> 1, last >> 1
        else:
            new = node_hash(new, sibling)
        at, last = at >> 1, last >> 1
    return last == 0 and old == first_root and new == second_root
