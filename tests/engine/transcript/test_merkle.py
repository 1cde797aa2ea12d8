"""RFC 6962 trees against the known Certificate Transparency vectors and an independent recursive definition."""

from __future__ import annotations

import hashlib

import pytest

from uvcc_engine.transcript.leaves.merkle import (
    EMPTY,
    TreeHasher,
    consistency_proof,
    inclusion_proof,
    is_consistent,
    root_from_inclusion,
    tree_root,
)

# inputs and roots of the Certificate Transparency reference tests
CT_INPUTS = [
    "",
    "00",
    "10",
    "2021",
    "3031",
    "40414243",
    "5051525354555657",
    "606162636465666768696a6b6c6d6e6f",
]
CT_ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def leaves(n: int) -> list[bytes]:
    return [hashlib.sha256(b"\x00" + bytes([i % 256, i // 256])).digest() for i in range(n)]


def recursive_root(items: list[bytes]) -> bytes:
    """RFC 6962 section 2.1, literally."""
    if len(items) == 1:
        return items[0]
    k = 1
    while k * 2 < len(items):
        k *= 2
    return hashlib.sha256(b"\x01" + recursive_root(items[:k]) + recursive_root(items[k:])).digest()


def test_known_vectors() -> None:
    tree = TreeHasher()
    for data, root in zip(CT_INPUTS, CT_ROOTS, strict=True):
        tree.append(hashlib.sha256(b"\x00" + bytes.fromhex(data)).digest())
        assert tree.root().hex() == root
    assert TreeHasher().root() == EMPTY == hashlib.sha256(b"").digest()


@pytest.mark.parametrize("n", [*range(1, 40), 127, 128, 129, 1000])
def test_stream_equals_recursion(n: int) -> None:
    assert tree_root(leaves(n)) == recursive_root(leaves(n))


def test_duplicated_last_leaf_changes_the_root() -> None:
    """The ambiguity of trees that pair an odd last node with itself does not exist here."""
    items = leaves(5)
    assert tree_root(items) != tree_root([*items, items[-1]])


def test_memory_is_logarithmic() -> None:
    tree = TreeHasher()
    for leaf in leaves(5000):
        tree.append(leaf)
        assert len(tree._stack) <= tree.size.bit_length()


@pytest.mark.parametrize("n", range(1, 20))
def test_inclusion(n: int) -> None:
    items = leaves(n)
    root = tree_root(items)
    for i in range(n):
        proof = inclusion_proof(items, i)
        assert root_from_inclusion(items[i], i, n, proof) == root
        assert root_from_inclusion(items[i], i, n, [*proof, root]) is None
        assert n == 1 or root_from_inclusion(items[i], i, n, proof[:-1]) != root
        for j in range(n):
            if j != i:
                assert root_from_inclusion(items[i], j, n, proof) != root
    with pytest.raises(IndexError):
        inclusion_proof(items, n)


@pytest.mark.parametrize("n", range(1, 20))
def test_consistency(n: int) -> None:
    items = leaves(n)
    root = tree_root(items)
    for first in range(1, n + 1):
        proof = consistency_proof(items, first)
        old = tree_root(items[:first])
        assert is_consistent(first, n, old, root, proof)
        assert not is_consistent(first, n, hashlib.sha256(old).digest(), root, proof)
        assert not is_consistent(first, n, old, hashlib.sha256(root).digest(), proof)
        assert not is_consistent(first, n, old, root, [*proof, root])
        for k in range(len(proof)):
            assert not is_consistent(first, n, old, root, proof[:k] + proof[k + 1 :])
    with pytest.raises(IndexError):
        consistency_proof(items, 0)
