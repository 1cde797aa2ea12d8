"""The three parties as threads of one process: for notebooks, rehearsals and tests. Needs torch (``uvcc[local]``).

    from uvcc_engine import simulate

    found = simulate.fit([{"linear": 16}, "relu", "linear"], x, y, epochs=3)
    print(found.report())
    labels = found.predict(x_new)

The protocols are those of a real run, message for message; what is missing are links, seals, signatures and the three
domains. So whoever runs this sees all secrets: it says what a run would compute and cost, and keeps nothing private.
With the keys of a run (``SessionKeys``) it computes that run's numbers, bit for bit.
"""

from uvcc_engine.simulate.arrays import Parties, SecretArray, matmul, mul, open, relu, share
from uvcc_engine.simulate.boosted import PrivateTrees
from uvcc_engine.simulate.clustering import PrivateKMeans
from uvcc_engine.simulate.estimators import PrivateClassifier, PrivateRegressor
from uvcc_engine.simulate.fitting import SessionKeys, SimulatedFit, fit, train
from uvcc_engine.simulate.metering import LayerCost

__all__ = [
    "LayerCost",
    "Parties",
    "PrivateClassifier",
    "PrivateKMeans",
    "PrivateRegressor",
    "PrivateTrees",
    "SecretArray",
    "SessionKeys",
    "SimulatedFit",
    "fit",
    "matmul",
    "mul",
    "open",
    "relu",
    "share",
    "train",
]
