"""k-means on shares: the same rounds as in clear, scikit-learn's inertia, and nothing revealed of too few rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.data.sets import Floats
from uvcc_engine.model.learning.kmeans import Clusters, first_centroids_protocol, lloyd_protocol
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import share_of, split

torch.set_num_threads(1)


def lloyd(x: Floats, centroids: Floats, least: int) -> Clusters:
    """One round at three parties, who must find the same."""
    made = split(torch.from_numpy(x), 16, np.random.default_rng(3).bytes)
    found = LocalPlanes(1).run_three(lambda rt: rt.run(lloyd_protocol(rt, share_of(made, rt.party), centroids, least)))
    assert all(np.array_equal(found[0].centroids, one.centroids) for one in found[1:])
    return found[0]


@pytest.mark.parametrize(("rows", "columns", "clusters"), [(40, 3, 2), (60, 2, 5), (30, 4, 12)])
def test_a_round_is_that_of_clear_numbers(rows: int, columns: int, clusters: int) -> None:
    rng = np.random.default_rng(rows)
    x, centroids = rng.normal(size=(rows, columns)) * 3, rng.normal(size=(clusters, columns)) * 3
    found = lloyd(x, centroids, 1)
    squares = np.square(x[:, None] - centroids).sum(2)
    nearest = squares.argmin(1)
    counts = np.bincount(nearest, minlength=clusters)
    assert found.counts.tolist() == counts.tolist()
    assert found.inertia == pytest.approx(squares.min(1).sum(), rel=1e-3)
    for k in range(clusters):
        wanted = x[nearest == k].mean(0) if counts[k] else centroids[k]
        assert np.abs(found.centroids[k] - wanted).max() < 1e-4


def test_no_mean_of_too_few_rows_is_opened() -> None:
    x = np.array([[0.0, 0.0]] * 6 + [[5.0, 5.0]])
    centroids = np.array([[0.5, 0.0], [4.0, 4.0]])
    found = lloyd(x, centroids, 3)
    assert found.counts.tolist() == [6, 1]
    assert np.abs(found.centroids - [[0.0, 0.0], [4.0, 4.0]]).max() < 1e-4  # the second stays where it was
    made = split(torch.from_numpy(x), 16, np.random.default_rng(3).bytes)

    def begin(rt: Runtime) -> None:
        rt.run(first_centroids_protocol(rt, share_of(made, rt.party), 2, 7, 4))

    with pytest.raises(ConfigError, match="2 clusters of 7 rows, none of fewer than 4"):
        LocalPlanes(1).run_three(begin)


def test_it_finds_what_scikit_learn_finds() -> None:
    sklearn = pytest.importorskip("sklearn.cluster")
    data = pytest.importorskip("sklearn.datasets").load_wine().data
    x = (data - data.mean(0)) / data.std(0)
    ours = simulate.PrivateKMeans(3, n_init=3, max_iter=20).fit(x)
    theirs = sklearn.KMeans(3, n_init=10, random_state=1).fit(x)
    assert ours.inertia_ <= theirs.inertia_ * 1.005
    assert sorted(ours.counts_.tolist()) == pytest.approx(sorted(np.bincount(theirs.labels_).tolist()), abs=3)
    assert np.bincount(ours.predict(x)).tolist() == pytest.approx(ours.counts_.tolist(), abs=1)
    with pytest.raises(ConfigError, match="1 clusters"):
        simulate.PrivateKMeans(1).fit(x)
