"""What a run revealed step by step, as its root statements sign it: what a ``training.csv`` must repeat."""

from __future__ import annotations

from collections.abc import Mapping

from uvcc_engine.transcript.proof.bundle import Bundle


def revealed_series(bundle: Bundle) -> Mapping[str, list[tuple[int, float]]]:
    """By name: (steps done, value) in order, counted as in ``training.csv``: the first step of a job is 1.

    Checks nothing: ``verify`` has made sure that every worker signed the same numbers, each where the policy wants it.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    first = bundle.policy.first_step + 1
    for _, statement in bundle.workers[0].roots:
        for name, value in statement.values.items():
            found.setdefault(name, []).append((first + statement.root.epoch, float(value)))
    return found
