"""k-means on shares with revealed centroids (Lloyd, 1982): which row belongs to which cluster stays secret.

Centroids are public numbers, so a row's distances to them are local; the nearest one is found by secure comparisons.
Revealed after every round are the clusters' sizes, and then the means of those that are not of too few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats, Ints, public_stream
from uvcc_engine.mpc.comparisons.maximum import argmax_one_hot_protocol
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, decode, encode
from uvcc_engine.mpc.products.arithmetic import add_ring, dot_protocol, matmul_protocol


@dataclass(frozen=True, slots=True)
class Clusters:
    """What one round of k-means reveals: the new centroids (clusters, columns), how many rows the old ones had, and
    the summed squared distances to the old ones."""

    centroids: Floats
    counts: Ints
    inertia: float


def lloyd_protocol(rt: Runtime, x: Share, centroids: Floats, least: int) -> MpcProtocol[Clusters]:
    """One round over rows (rows, columns): 6 rounds for the nearest of up to 10 centroids, 4 for sums and distances,
    and 2 openings. A cluster of fewer than ``least`` rows keeps its centroid, and no sum of it is opened."""
    scores = _scores(rt, x, centroids)
    bits = yield from argmax_one_hot_protocol(rt, scores)
    chosen = dot_protocol(rt, scores, bits)
    squares = dot_protocol(rt, x, x)
    sums, near, total = yield from par(matmul_protocol(rt, x.T, bits), chosen, squares)
    sizes, best, all_squares = yield from par(
        open_ring_protocol(rt, bits.sum(0)),
        open_ring_protocol(rt, Share(near.first, near.second, near.f)),
        open_ring_protocol(rt, total),
    )
    counts = sizes.cpu().numpy().astype(np.int64)
    inertia = float(decode(all_squares, total.f).item() - decode(best, near.f).item())
    kept = np.flatnonzero(counts >= least)
    found = centroids.copy()
    if len(kept):
        opened = yield from open_ring_protocol(rt, sums.index((slice(None), torch.from_numpy(kept))))
        found[kept] = (decode(opened, x.f).cpu().numpy() / counts[kept]).T
    return Clusters(found, counts, inertia)


def _scores(rt: Runtime, x: Share, centroids: Floats) -> Share:
    """``2 x c - c c`` of every row and centroid, largest at the nearest. Local, at twice the scale of ``x``."""
    c = encode(torch.from_numpy(centroids), x.f, name="centroids").to(rt.device)
    twice = x.map(lambda t: t @ (2 * c).T).with_f(2 * x.f)
    return add_ring(rt, twice, -c.square().sum(1))


def first_centroids_protocol(rt: Runtime, x: Share, clusters: int, seed: int, least: int) -> MpcProtocol[Floats]:
    """Centroids to begin with, spread like the rows, from means of groups of at least ``least`` rows: 1 opening.

    Groups are drawn by a public seed. A group's mean is as far from that of all as a row, divided by the root of the
    group's size; it is moved away by that. Raises ConfigError for too few rows.
    """
    rows = x.shape[0]
    size = rows // clusters
    if size < max(1, least):
        raise ConfigError(f"{clusters} clusters of {rows} rows, none of fewer than {least}", "fewer clusters")
    order = np.argsort(public_stream("kmeans", seed, 0, rows), kind="stable")[: size * clusters]
    sums = x.index(torch.from_numpy(order.astype(np.int64))).reshape(clusters, size, -1).sum(1)
    opened = yield from open_ring_protocol(rt, sums)
    means: Floats = decode(opened, x.f).cpu().numpy() / size
    middle = means.mean(0)
    spread: Floats = middle + (means - middle) * float(np.sqrt(size))
    return spread


def kmeans_protocol(
    rt: Runtime, x: Share, clusters: int, *, rounds: int, seed: int, least: int, settled: float = 1e-4
) -> MpcProtocol[tuple[Floats, list[Clusters]]]:
    """Centroids (clusters, columns) and what was revealed on the way; it ends when no centroid moves by ``settled``."""
    centroids = yield from first_centroids_protocol(rt, x, clusters, seed, least)
    told: list[Clusters] = []
    for _ in range(rounds):
        found = yield from lloyd_protocol(rt, x, centroids, least)
        told.append(found)
        moved = float(np.abs(found.centroids - centroids).max())
        centroids = found.centroids
        if moved <= settled:
            break
    return centroids, told
