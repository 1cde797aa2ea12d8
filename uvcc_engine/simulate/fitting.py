"""Train a model between three simulated parties, and see what it learned, what it cost and how large numbers became."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
import yaml
from numpy.typing import ArrayLike

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.kmeans_job import PLAIN
from uvcc_engine.contract.job.private_job import HIGHEST_LOG_RATE, PrivateJob
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.data.coefficient_errors import standard_errors
from uvcc_engine.data.sets import Dataset, Floats, Ints, Labels, split
from uvcc_engine.model import layers as nn
from uvcc_engine.model.definition.layer_list import (
    check_labels,
    is_module_file,
    model_of_json,
    model_of_list,
    model_to_json,
)
from uvcc_engine.model.definition.specs import MODELS, ModelSpec, find_model
from uvcc_engine.model.definition.torch_module import model_of_file, model_of_module
from uvcc_engine.model.learning.plaintext import PlaintextResult, forward, train_plaintext
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.prg import PairKeys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, random_ring, reconstruct
from uvcc_engine.mpc.kernels.choose import device_for
from uvcc_engine.proofs.audit_draws import audited
from uvcc_engine.sealing.inputs import PartyInputs, dataset_tensors
from uvcc_engine.sharding.validation import (
    check_counts,
    check_inputs,
    check_statistics,
    check_tensors,
    fit_model,
    shapes_of,
)
from uvcc_engine.simulate.given_rows import flat_features, given_labels, given_rows, given_weights
from uvcc_engine.simulate.metering import LayerCost, Metering
from uvcc_engine.simulate.training_bar import Progress, teller

_TEST: Final = 0.2
_PLAIN: Final = PrivateJob()
_PATIENCE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """What decides how truncations round, besides the program and its inputs: the keys of three parties, in order, the
    session's id (``transcript.leaves.roots.sid_of``) and the attempt. Those of a run give that run's numbers."""

    parties: tuple[PairKeys, PairKeys, PairKeys]
    sid_sub: bytes
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedFit:
    """A trained model in clear, and what its training revealed and cost.

    ``classes``: the labels in the order of the model's outputs, none where numbers are fitted. ``losses`` and
    ``metrics``: those that the job reveals. ``validated``: the revealed numbers of validation, by steps done.
    ``steps``: how many were done, fewer than the job's where its ``patience`` ended it.
    ``rounds`` and ``bytes_sent`` (of the three parties together) are those of the whole training, ``step_costs`` both
    of each of its steps. ``audited``: with ``verify="covert"``, which parties proved each step, and the metrics at the
    end. ``standard_errors``: those of a regression's coefficients, the intercept's last, if listed.
    """

    job: PrivateJob
    data: Dataset
    model: ModelSpec
    weights: tuple[Floats, ...]
    classes: tuple[Any, ...]
    losses: tuple[float, ...]
    metrics: Mapping[str, float]
    validated: Mapping[int, Mapping[str, float]]
    steps: int
    rounds: int
    bytes_sent: int
    seconds: float
    layers: tuple[LayerCost, ...]
    step_costs: tuple[tuple[int, int], ...] = ()
    standard_errors: Floats | None = None
    audited: tuple[tuple[int, ...], ...] = ()

    @property
    def accuracy(self) -> float:
        """Share of the test rows that the private model got right; nan if the job does not reveal it."""
        return self.metrics.get("accuracy", math.nan)

    def outputs(self, x: ArrayLike) -> Floats:
        """The model's outputs (rows, classes), in clear with the opened weights."""
        rows = flat_features(x)
        with torch.no_grad():
            found: Floats = forward(self.model, [torch.from_numpy(w) for w in self.weights], rows).numpy()
        return found

    def predict_proba(self, x: ArrayLike) -> Floats:
        """Every class's probability, in clear with the opened weights. Raises ConfigError where there are none."""
        if not self.classes or self.model.unsupervised:
            raise ConfigError("this model fits numbers or clusters, and has no classes", "use predict")
        if self.model.classes == 1:
            chance = torch.sigmoid(torch.from_numpy(self.outputs(x)))
            both: Floats = torch.cat([1.0 - chance, chance], 1).numpy()
            return both
        found: Floats = torch.softmax(torch.from_numpy(self.outputs(x)), 1).numpy()
        return found

    def predict(self, x: ArrayLike) -> np.ndarray[Any, Any]:
        """The likeliest class of every row, the number that is expected, or the nearest centroid's, in clear with the
        opened weights."""
        found: np.ndarray[Any, Any]
        if self.model.unsupervised:
            found = self.outputs(x).argmax(1)
            return found
        if self.classes:
            found = np.array(self.classes)[self.predict_proba(x).argmax(1)]
            return found
        found = self.outputs(x)[:, 0]
        return np.exp(np.minimum(found, HIGHEST_LOG_RATE)) if self.job.objective == "poisson" else found

    def profile(self, data: str) -> str:
        """The profile (YAML) that runs the same job for real, on three local pods; change ``fleet`` for others.

        ``data``: the file with the same rows and labels, such as ``numpy.savez(data, x=x, y=numbers)`` wrote. Classes
        only, split by the job's seed. Raises ConfigError for other targets, which take a table with a schema.
        """
        if self.model.labels <= 1:
            raise ConfigError("a file of rows holds classes", "write a CSV file, and give the job its schema")
        job = {"kind": "private"} | self.job.to_json() | {"rounds": self.job.rounds, "data": data}
        return yaml.safe_dump({"job": job, "topology": {}, "fleet": {"provider": "local"}}, sort_keys=False)

    def twin(self) -> PlaintextResult:
        """The same training in clear: float64, the same rows, order, start and schedule."""
        return train_plaintext(self.job, self.data, model=self.model)

    def report(self) -> str:
        """Rounds, bytes and ranges, layer by layer, for people."""
        f, steps = self.job.frac_bits, max(1, self.steps)
        lines = [
            f"{self.steps} steps of {self.rounds / steps:.1f} rounds and {self.bytes_sent / steps / 1e6:.2f} MB"
            f" (of all three parties), {self.seconds:.1f} s here",
            f"{'layer':<18}{'rounds':>8}{'kB a step':>12}{'largest':>12}{'headroom':>10}",
        ]
        for one in self.layers:
            kb = sum(one.bytes.values()) / 1e3
            bits = f"{one.headroom:.0f} bits"
            lines.append(f"{one.layer:<18}{sum(one.rounds.values()):>8.1f}{kb:>12.1f}{one.largest:>12.4g}{bits:>10}")
        tight = [one.layer for one in self.layers if one.headroom < 4]
        if tight:
            lines.append(f"layer {tight[0]} comes near the ring's end: try frac_bits below {f}, or smaller numbers")
        return "\n".join(lines)


def fit(
    model: Any,
    x: ArrayLike,
    y: ArrayLike | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    test: float | tuple[ArrayLike, ArrayLike] = _TEST,
    keys: SessionKeys | None = None,
    progress: bool | Progress = False,
    watch_range: bool = False,
    validation: float = 0.0,
    row_weights: ArrayLike | None = None,
    **job: Any,
) -> SimulatedFit:
    """Train ``model`` on rows ``x`` and labels ``y``, which k-means alone has not, between three simulated parties.

    A module with a ``vocabulary`` takes whole numbers (rows, positions), and labels of that shape if it answers at
    each. ``model``: a ``torch.nn.Module`` or ``"file.py:Model"``, of which the layers are taken, not the weights; a
    shipped name, a list of layers as in a profile, a ``ModelSpec``, or its JSON. ``test``: the share of
    rows that is held out by the job's seed, or rows and labels of their own; ``validation``: the share of rows that the
    job's ``val_*`` values are of. ``row_weights``: what each row of ``x`` counts in the loss, 0 to 16.
    ``watch_range``: a debugging mode that raises RingRangeError as soon as a number passes 2^62 before a
    truncation. All else are the keys of a private job (``batch``, ``lr``, ``optimizer``, ``seed``, ...). With
    ``verify="products"`` every product of a step and its truncation is proved before anything of the step is opened;
    comparisons, choices by bits, exponentials and look-ups are not proved; with ``verify="proofs"`` every message is,
    with ``verify="covert"`` every message of one party's step in ``audit_one_in``.
    Raises ConfigError for what does not fit, before it computes.
    """
    letters = int(getattr(model, "vocabulary", 0))
    features = given_rows(x, letters)
    count, labels = len(features), given_labels(y, len(features))
    if labels.ndim not in (1, 2 if letters or y is None else 1) or len(labels) != count or not count:
        raise ConfigError(f"{features.shape} features and {labels.shape} labels do not fit", "one label per row")
    if isinstance(test, tuple):
        features, labels = (
            np.concatenate([features, given_rows(test[0], letters)]),
            np.concatenate([labels, given_labels(None if y is None else test[1], len(given_rows(test[0], letters)))]),
        )
    own = given_weights(row_weights, count)
    job = job | ({} if own is None else {"row_weights": True})
    objective = str(job.get("objective", _PLAIN.objective))
    classes, numbers = ((), labels) if y is None else _targets(objective, labels, letters)
    outputs = len(classes) if objective in ("cross-entropy", "mse") and classes else int(y is not None)
    spec = _model(model, np.shape(x)[1:], outputs, max(1, labels.shape[1]) if labels.ndim == 2 else 1)
    if y is None and not spec.unsupervised:
        raise _unlabelled(spec.name)
    check_labels(spec, outputs)
    if isinstance(test, tuple):
        if validation:
            raise ConfigError("validation beside test rows of their own", "give test as a share, too")
        n = count
        data = Dataset(features[:n], numbers[:n], features[n:], numbers[n:], outputs, weights=own)
    else:
        held, val = round(float(test) * len(features)), round(float(validation) * len(features))
        data = split(features, numbers, int(job.get("seed", _PLAIN.seed)), held, outputs, val, own)
    default: dict[str, Any] = {"reveal": ["loss", "accuracy" if classes else "rmse"]}
    if y is None:
        default = {"reveal": ["loss", "inertia"], "batch": len(data.train_x)} | PLAIN
    asked = _job(spec, data, epochs, steps, default | job)
    return replace(
        train(asked, data, keys=keys, progress=progress, watch_range=watch_range, model=spec, on=_on(asked)),
        classes=classes,
    )


def _on(job: PrivateJob) -> str:
    """Where a fit computes: a notebook's GPU is taken only where ``device="cuda"`` asks for it."""
    return "cuda" if job.device == "cuda" else "cpu"


def _targets(objective: str, labels: np.ndarray[Any, Any], letters: int) -> tuple[tuple[Any, ...], Labels]:
    """Classes, none where numbers are fitted, and the labels as numbers."""
    if labels.ndim == 2:  # of a model that answers at every letter
        return tuple(range(letters)), labels.astype(np.int64)
    if objective in ("huber", "poisson") or (objective == "mse" and labels.dtype.kind == "f"):
        return (), labels.astype(np.float64)
    classes, numbers = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ConfigError(f"all {labels.size} labels are {classes[0]}", "give rows of two classes or more")
    if objective == "binary":
        if len(classes) != 2:
            raise ConfigError(f"objective 'binary' for {len(classes)} classes", "use cross-entropy, or two classes")
        return tuple(classes.tolist()), numbers.astype(np.float64)
    return tuple(classes.tolist()), numbers.astype(np.int64)


def train(
    job: PrivateJob,
    data: Dataset,
    *,
    keys: SessionKeys | None = None,
    progress: bool | Progress = False,
    watch_range: bool = False,
    watched_steps: int | None = None,
    model: ModelSpec | None = None,
    on: str = "cpu",
    audit_one_in: int = 0,
) -> SimulatedFit:
    """Train exactly as ``job`` says, epoch for epoch as one worker per party does. ``watch_range``: see ``fit``; with
    ``watched_steps`` so many steps are watched, which makes them slower.

    ``model``: the job's, where it computes with a public base (``base_model.adapted`` or ``attached``). ``on``: where
    all three parties compute, ``cpu`` or ``cuda``, whatever device the job's pods have. Raises ConfigError without it.
    ``audit_one_in``: under ``verify="covert"``, in place of the job's: 1 audits every step, 2^64 none.
    """
    checked = fit_model(job)
    model = checked if model is None or not checked.public_layers else model
    for part, (x, _) in data.parts.items():
        check_inputs(job, f"{part} features", x)
    tensors = dataset_tensors(data, job.frac_bits, job)
    check_tensors(shapes_of(tensors), job, model)
    check_counts(shapes_of(tensors), job)
    check_statistics(shapes_of(tensors), job)
    inputs = party_inputs(tensors, job.frac_bits)
    device = device_for(on)
    planes = LocalPlanes(job.seed, few_rounds=job.rounds == "few", device=device, prg=job.random_generator)
    planes.wire.wait_s = _PATIENCE_S  # a party waits while the others compute on the same processor
    if keys is not None:
        planes.runtimes = [
            Runtime(
                p,
                planes.planes[p],
                mine,
                keys.sid_sub,
                keys.attempt,
                device=device,
                prg=job.random_generator,
                few_rounds=job.rounds == "few",
            )
            for p, mine in enumerate(keys.parties)
        ]
    if watch_range:
        planes.watch_range()
    metering, tell = Metering(model.layers), teller(progress)
    began = time.monotonic()

    def body(rt: Runtime) -> tuple[list[float], dict[str, float], list[Share], list[Share]]:
        trainer = trainer_of(rt, job, model, inputs[rt.party])
        if audit_one_in and rt.ledger is not None:
            rt.ledger.audit_one_in = audit_one_in
        metering.attach(rt.party, list(nn.flat(trainer.layers)))
        losses, step = [], 0
        while step < job.steps and not trainer.validations.ended:
            rt.begin_epoch(step)
            if step == watched_steps:
                rt.range_watch = None
            result = trainer.step(step)
            step += 1
            taken[rt.party].append((rt.rounds, rt.bytes_sent))
            losses += [] if result.loss is None else [result.loss]
            if rt.party == 0:
                draws.append(() if result.proved is None else result.proved.drawn)
                validated.update({step: result.validated} if result.validated else {})
                tell(step, job.steps, result.loss)
        costs[rt.party] = (rt.rounds, rt.bytes_sent)
        done[rt.party] = step
        metering.stop(rt.party)
        rt.begin_epoch(step)
        metrics = trainer.evaluate()
        if rt.party == 0:
            draws.append(trainer.proved_metrics.drawn)
        return losses, metrics, trainer.weights, trainer.information

    costs: dict[int, tuple[int, int]] = {}
    taken: list[list[tuple[int, int]]] = [[(0, 0)] for _ in range(PARTIES)]
    done: dict[int, int] = {}
    validated: dict[int, Mapping[str, float]] = {}
    draws: list[tuple[int, ...]] = []
    results = planes.run_three(body)
    losses, metrics, *_ = results[0]
    information = [reconstruct([r[3][i] for r in results]).cpu().numpy() for i in range(len(results[0][3]))]
    weights = [reconstruct([r[2][i] for r in results]).cpu().numpy() for i in range(len(model.weights))]
    return SimulatedFit(
        job=job,
        data=data,
        model=model,
        weights=tuple(weights),
        classes=tuple(range(model.classes)) if model.classes > 1 else (),
        losses=tuple(losses),
        metrics=metrics,
        validated=validated,
        steps=done[0],
        rounds=costs[0][0],
        bytes_sent=sum(sent for _, sent in costs.values()),
        seconds=time.monotonic() - began,
        layers=tuple(metering.costs(done[0], job.frac_bits)),
        step_costs=_by_step(taken),
        standard_errors=standard_errors(*information) if information else None,
        audited=tuple(audited(one, rare) for one in draws) if (rare := job.proving.audit_one_in) else (),
    )


def _by_step(taken: Sequence[Sequence[tuple[int, int]]]) -> tuple[tuple[int, int], ...]:
    """(rounds, bytes of all parties) of each step, from what each party had counted after each."""
    found = []
    for done in range(1, min(len(of_party) for of_party in taken)):
        rounds = taken[0][done][0] - taken[0][done - 1][0]
        found.append((rounds, sum(of_party[done][1] - of_party[done - 1][1] for of_party in taken)))
    return tuple(found)


def _model(model: Any, shape: tuple[int, ...], classes: int, positions: int = 1) -> ModelSpec:
    features = math.prod(shape)
    if isinstance(model, ModelSpec):
        return model
    if not classes and (isinstance(model, torch.nn.Module) or (isinstance(model, str) and is_module_file(model))):
        raise _unlabelled("a module")
    if not classes and isinstance(model, list) and not any(isinstance(one, dict) and "kmeans" in one for one in model):
        raise _unlabelled("a list of layers")
    if isinstance(model, torch.nn.Module):
        return model_of_module(model, getattr(model, "input_shape", shape), classes, positions=positions).model
    if isinstance(model, str):
        return model_of_file(model, features, classes).model if is_module_file(model) else find_model(model)
    return model_of_list(model, features, classes, positions) if isinstance(model, list) else model_of_json(model)


def _unlabelled(what: str) -> ConfigError:
    return ConfigError(f"rows without labels, and {what}, which learns some", "give y; k-means alone learns none")


def _job(spec: ModelSpec, data: Dataset, epochs: int | None, steps: int | None, given: dict[str, Any]) -> PrivateJob:
    if (epochs is None) == (steps is None):
        raise ConfigError("give epochs or steps, and not both", "like epochs=3")
    batch = int(given.get("batch", min(_PLAIN.batch, len(data.train_x))))
    count = steps if epochs is None else -(-epochs * len(data.train_x) // batch)
    named = spec.name if MODELS.get(spec.name) is spec else model_to_json(spec)
    values = {"lr": 0.1, "frac_bits": max(16, spec.frac_bits)} | given
    values |= {"base": spec.base} if spec.base else {}
    values |= {"model": named, "steps": count, "batch": batch, "test_rows": len(data.test_x)}
    if data.val_x is not None:
        often = {"val_every": -(-len(data.train_x) // batch)} if epochs is not None else {}
        values = often | values | {"val_rows": len(data.val_x)}
    return PrivateJob.from_json(json.loads(json.dumps(values)))


def party_inputs(tensors: dict[str, Ints], frac_bits: int) -> list[PartyInputs]:
    """Every tensor in three components, two of them for each party."""
    made: dict[str, list[Ints]] = {}
    for name, whole in tensors.items():
        first, second = (random_ring(torch.Size(whole.shape), os.urandom).numpy() for _ in range(2))
        made[name] = [first, second, whole - first - second]
    return [
        PartyInputs(p, frac_bits, {name: (c[p], c[(p + 1) % PARTIES]) for name, c in made.items()})
        for p in range(PARTIES)
    ]
