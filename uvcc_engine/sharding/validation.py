"""Whether a job, its model and its data fit together: everything that can be refused before anybody is asked to work.

The console and the data owner check here before a pod is paid for, every party before its first message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import (
    METRICS,
    STANDARD_ERRORS,
    STANDARDISED_LEAST,
    STANDARDISED_ROWS,
    VALIDATIONS,
    PrivateJob,
)
from uvcc_engine.data.bins import check_bits
from uvcc_engine.data.sets import Floats
from uvcc_engine.data.weighted_targets import TRAIN_WEIGHTS, carries_weights
from uvcc_engine.model.definition.specs import Conv2d, Dense, ModelSpec, Pool, Relu, find_model
from uvcc_engine.model.layer_spec import LayerSpec, field_kinds
from uvcc_engine.model.layer_types.adapted import Adapted
from uvcc_engine.model.layer_types.affine import Affine
from uvcc_engine.model.layer_types.attention import Attention
from uvcc_engine.model.layer_types.batch_norm import BatchNorm
from uvcc_engine.model.layer_types.branches import Branches, Chain
from uvcc_engine.model.layer_types.centroids import KMeans, kmeans_of
from uvcc_engine.model.layer_types.conv2d import Conv1d
from uvcc_engine.model.layer_types.dropout import Dropout
from uvcc_engine.model.layer_types.embedding import Embedding
from uvcc_engine.model.layer_types.gelu import Gelu
from uvcc_engine.model.layer_types.layer_norm import LayerNorm
from uvcc_engine.model.layer_types.leaky_relu import LeakyRelu
from uvcc_engine.model.layer_types.places import LinePlaces, Prefix
from uvcc_engine.model.layer_types.public import Public, Started
from uvcc_engine.model.layer_types.rearrange import Rearrange
from uvcc_engine.model.layer_types.reduce import Reduce, Softmax
from uvcc_engine.model.layer_types.residual import Residual
from uvcc_engine.model.layer_types.rms_norm import RmsNorm
from uvcc_engine.model.layer_types.smooth import Sigmoid, Silu, Tanh
from uvcc_engine.model.layer_types.tied import Tied
from uvcc_engine.model.layer_types.trees import MOST_ROWS, Trees, trees_of
from uvcc_engine.model.shapes import check_shared
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.inputs import check_units
from uvcc_engine.sharding.partition import place_layers, stage_bounds

QUERY: Final = "query_x"
PREDICTION: Final = "prediction"
ANYWHERE: Final = ("accuracy", "perplexity", "overflow")
"""Metrics of models that answer at each position of a row, too."""
OF_ONE_WORKER: Final = ("overflow", "val_overflow", STANDARD_ERRORS)
"""What only a training with one worker per party can reveal."""
MOST_COLUMNS: Final = 256
"""Of a regression with standard errors: their matrix has the square of it."""
PROVED_LAYERS: Final = (
    *(Dense, Conv2d, Conv1d, Pool, Relu, LeakyRelu, Gelu, Sigmoid, Tanh, Silu, Softmax, Attention, Embedding),
    *(Trees, KMeans),
    *(LayerNorm, RmsNorm, BatchNorm, Dropout, Affine, LinePlaces, Prefix, Rearrange, Reduce),
    *(Residual, Branches, Chain, Tied, Adapted, Public, Started),
)
"""Layers all of whose messages have a proof; one from elsewhere may send some that have none."""


def fit_model(
    job: PrivateJob,
    *,
    workers: int = 1,
    replicas: int = 1,
    stages: int = 1,
    tensor: int = 1,
    microbatches: int = 1,
) -> ModelSpec:
    """The model of a job. Raises ConfigError if there is none of that name, or if job and model do not fit.

    ``workers``: per party, times the microbatches. What more than one trains must divide into ``stages`` and over
    ``tensor`` ranks, and a replica's batch into ``microbatches``, and each of ``replicas`` needs rows to test on.
    """
    model = find_model(job.model)
    if job.frac_bits < model.frac_bits:
        raise ConfigError(
            f"job.frac_bits is {job.frac_bits}, {model.name} needs {model.frac_bits}", f"give {model.frac_bits} to 24"
        )
    if bool(job.base) != bool(model.public_layers):
        what = "names a base, and its model has no layer of one" if job.base else "has public layers, and no base"
        raise ConfigError(f"the job {what}", "job.base and job.adapters go together")
    if job.join is not None and sum(job.join.columns) != model.features:
        what = f"job.join.columns come to {sum(job.join.columns)} features, {model.name} takes {model.features}"
        raise ConfigError(what, "count the features of each owner's schema")
    check_metrics(job, model)
    check_regression(job, model)
    check_trees(job, model, replicas)
    check_kmeans(job, model, replicas)
    check_summed(model, stages=stages, tensor=tensor, microbatches=microbatches)
    check_provable(job, model)
    special = [
        f"{name} {value!r}"
        for name, value, plain in (
            ("task", job.task, "train"),
            ("standardise", job.standardise, False),
        )
        if value != plain
    ]
    special += [f"reveal: {name!r}" for name in OF_ONE_WORKER if name in job.reveal]
    if workers > 1 and special:
        raise ConfigError(f"job.{special[0]} on {workers} workers or microbatches per party", "use one of each for it")
    if job.task == "train":
        check_slices(job, model, microbatches)
    if workers > 1:
        place_layers(model, tensor)
        stage_bounds(model, stages)
        _check_rows_of_ranks(job, model, replicas, tensor, microbatches)
    return model


def check_slices(job: PrivateJob, model: ModelSpec, microbatches: int = 1) -> None:
    """Refuse (ConfigError), as PyTorch does, a microbatch in which a layer would take the variance of a single number:
    all that comes out of it is 0."""
    rows = job.batch // microbatches
    for layer in _all_layers(model.layers):
        if 0 < rows * layer.values_a_channel < 2:
            raise ConfigError(
                f"{model.name}: {type(layer).__name__} of microbatches of {rows} row, one number a channel",
                "a larger job.batch, or fewer microbatches: each is brought to mean 0 and variance 1 by itself",
            )


def check_provable(job: PrivateJob, model: ModelSpec) -> None:
    """Refuse (ConfigError naming it) what ``job.verify`` cannot prove: nothing is computed without a proof then."""
    if not job.proves:
        return
    odd = [f"layer {type(layer).__name__}" for layer in _all_layers(model.layers) if type(layer) not in PROVED_LAYERS]
    if odd:
        raise ConfigError(
            f"job.verify is {job.verify!r}, and there is no proof of {odd[0]}",
            "verify: off, or the layers that UVCC brings along",
        )


def _all_layers(layers: Sequence[LayerSpec]) -> Iterator[LayerSpec]:
    """Layers, and those within them."""
    for layer in layers:
        yield layer
        held = (getattr(layer, name) for name in field_kinds(type(layer)))  # a layer with a public weight holds one
        yield from _all_layers([*(one for one in held if isinstance(one, LayerSpec)), *layer.inner])


def check_regression(job: PrivateJob, model: ModelSpec) -> None:
    """Refuse (ConfigError) standard errors of what is no regression, or of too many columns."""
    if STANDARD_ERRORS not in job.reveal:
        return
    if [layer.adaptable for layer in model.layers] != [(model.features, 1)]:
        raise ConfigError(
            f"job.reveal: 'standard_errors' of the model {model.name}",
            "a regression is one linear layer of one output: model: [linear]",
        )
    if model.features > MOST_COLUMNS:
        raise ConfigError(f"standard errors of {model.features} columns", f"at most {MOST_COLUMNS} columns")


def check_summed(model: ModelSpec, **ways: int) -> None:
    """Refuse (ConfigError) a way to divide trees or k-means, which replicas alone can be."""
    for way, n in ways.items():
        if n > 1 and (model.unsupervised or trees_of(model) is not None):
            what = f"{way} of {n}, and {model.name} is " + ("k-means" if model.unsupervised else "trees")
            raise ConfigError(what, f"{way}: 1; replicas divide the rows of what is made of sums over them")


def check_trees(job: PrivateJob, model: ModelSpec, replicas: int = 1) -> None:
    """Refuse (ConfigError) trees beside other layers, and what a job asks of them that they have not."""
    trees = trees_of(model)
    if trees is None:
        if any(layer.grown for layer in _all_layers(model.layers)):
            raise ConfigError(f"{model.name} has trees and other layers", "trees stand alone: job.model: [{trees: 20}]")
        return
    if job.task != "train":
        return
    odd = [
        f"job.{name} {value!r}"
        for name, value, plain in (
            ("optimizer", job.optimizer, "sgd"),
            ("momentum", job.momentum, 0.0),
            ("weight_decay", job.weight_decay, 0.0),
            ("clip_norm", job.clip_norm, 0.0),
            ("standardise", job.standardise, False),
            ("row_weights", job.row_weights, False),
            ("class_weights", job.class_weights, ()),
        )
        if value != plain
    ]
    odd += [] if job.objective in ("binary", "cross-entropy", "mse") else [f"objective {job.objective!r}"]
    if odd:
        raise ConfigError(
            f"{odd[0]} with trees",
            "trees grow one by one: momentum: 0, optimizer: sgd, objective binary, cross-entropy or mse, and no"
            " decay, clipping or weights; lr is what their answers are multiplied by",
        )
    if job.steps > trees.count:
        raise ConfigError(f"job.steps is {job.steps}, one for each of {trees.count} trees", "make them as many")
    if job.batch * replicas > MOST_ROWS:
        most = MOST_ROWS // replicas
        raise ConfigError(f"trees grown from {job.batch * replicas} rows each", f"job.batch of at most {most}")


def check_kmeans(job: PrivateJob, model: ModelSpec, replicas: int = 1) -> None:
    """Refuse (ConfigError) k-means beside other layers, and what a job asks of it that it has not."""
    if not model.unsupervised:
        if any(layer.unsupervised for layer in _all_layers(model.layers)):
            what = f"{model.name} has k-means and other layers"
            raise ConfigError(what, "k-means stands alone: job.model: [{kmeans: 3}]")
        return
    if job.task != "train":
        return
    odd = [
        f"job.{name} {value!r}"
        for name, value, plain in (
            ("optimizer", job.optimizer, "sgd"),
            ("momentum", job.momentum, 0.0),
            ("weight_decay", job.weight_decay, 0.0),
            ("clip_norm", job.clip_norm, 0.0),
            ("row_weights", job.row_weights, False),
            ("join", job.join, None),
        )
        if value != plain
    ]
    odd += [f"job.lr {job.lr:g}"] if job.lr > 1.0 else []
    if odd:
        raise ConfigError(
            f"{odd[0]} with k-means",
            "a step moves centroids towards the mean of their rows: lr up to 1 is how far, momentum: 0, optimizer: sgd,"
            " and no decay, clipping or weights; all owners have the same columns",
        )
    most = 2.0 ** (60 - 2 * job.frac_bits)
    if (rows := job.batch * replicas) * model.features > most:
        what = f"k-means with {rows} rows of {model.features} features a step, and job.frac_bits {job.frac_bits}"
        raise ConfigError(what, f"at most {most:.3g} numbers: a smaller batch, or fewer frac_bits")


def check_inputs(job: PrivateJob, name: str, features: Floats) -> None:
    """Refuse (ConfigError) features ``[rows, features]`` that the parties cannot compute with, before they are shared.

    They are too large for the statistics that the parties take, or for the distances of k-means, or no bits where trees
    ask bits.
    """
    check_units(job, name, features)
    model = find_model(job.model)
    if trees_of(model) is not None:
        check_bits(features, what=name)
    if model.unsupervised and not job.standardise:
        squares, most = float(np.square(features).sum()), 2.0 ** (60 - 2 * job.frac_bits)
        if squares > most:
            what = f"the squares of {name} come to {squares:.3g}, and k-means adds up to {most:.3g}"
            raise ConfigError(what, "give the columns kind: standardise, which brings them to one scale, too")


def check_metrics(job: PrivateJob, model: ModelSpec) -> None:
    """Refuse (ConfigError) an objective or a metric that does not fit the model's outputs, or too few rows for one."""
    single = model.classes == 1
    if (job.objective == "inertia") != model.unsupervised and job.task == "train":
        raise ConfigError(
            f"objective {job.objective!r} for {model.name}", "k-means has objective: inertia, and nothing else has"
        )
    if (job.objective in ("binary", "huber", "poisson") and not single) or (
        job.objective == "cross-entropy" and single
    ):
        raise ConfigError(
            f"objective {job.objective!r} for {model.classes} outputs",
            "cross-entropy takes one per class, binary, huber and poisson take one",
        )
    if job.objective == "cross-entropy" and job.task == "train":
        check_shared(f"{model.name}: the number of classes", model.classes)
    _check_weights(job, model)
    for name in job.reveal:
        measure = name.removeprefix("val_")
        fits = _fits(measure, job, model)
        if not fits or (measure in METRICS and model.positions > 1 and measure not in ANYWHERE):
            raise ConfigError(
                f"job.reveal: {name!r} for objective {job.objective!r} and {model.classes} outputs",
                "rmse and r2 are of numbers, accuracy and confusion of classes, auc, precision and recall of two"
                " classes, perplexity is of cross-entropy, inertia of k-means, which has no other",
            )
    fewest = min(job.batch if "loss" in job.reveal else job.min_rows, job.test_rows, job.val_rows or job.test_rows)
    if fewest < job.min_rows and any(name in job.reveal for name in ("loss", *METRICS, *VALIDATIONS)):
        raise ConfigError(
            f"a number of {fewest} rows would be revealed, job.min_rows is {job.min_rows}",
            "take larger batches and more test rows, or reveal less",
        )


def _fits(measure: str, job: PrivateJob, model: ModelSpec) -> bool:
    """Whether a metric, without its ``val_``, is of such outputs; what is no metric always is."""
    if model.unsupervised or measure == "inertia":
        return measure not in METRICS or (model.unsupervised and measure == "inertia")
    real = model.classes == 1 and job.objective != "binary"
    two = job.objective == "binary" or (model.classes == 2 and job.objective == "cross-entropy")
    return {
        "accuracy": not real,
        "confusion": not real,
        "auc": two,
        "precision": two,
        "recall": two,
        "perplexity": job.objective == "cross-entropy",
        "rmse": real,
        "r2": real,
    }.get(measure, True)


def _check_weights(job: PrivateJob, model: ModelSpec) -> None:
    kinds = 2 if job.objective == "binary" else model.classes
    if job.class_weights and len(job.class_weights) != kinds:
        what = f"job.class_weights has {len(job.class_weights)} numbers for {kinds} classes"
        raise ConfigError(what, "give one for each class, in the order of target.values")
    if carries_weights(job) and model.positions > 1:
        what = f"job.row_weights with objective {job.objective!r} at {model.positions} positions of a row"
        raise ConfigError(what, "cross-entropy takes weights there")


def _check_rows_of_ranks(job: PrivateJob, model: ModelSpec, replicas: int, tensor: int, microbatches: int) -> None:
    """Every tensor rank needs a line of every microbatch: a position of a row, where rows have positions."""
    held_out = (("test", job.test_rows, METRICS), ("val", job.val_rows, VALIDATIONS))
    for part, count, told in held_out:
        lines = count // replicas * model.positions
        if set(told) & set(job.reveal) and lines < tensor:
            raise ConfigError(
                f"job.{part}_rows is {count}: {lines} lines for a replica's {tensor} tensor ranks",
                f"give at least {replicas * -(-tensor // model.positions)}",
            )
    rows = job.batch // microbatches
    if rows * model.positions < tensor:
        raise ConfigError(
            f"a batch of {job.batch} rows in {microbatches} microbatches gives {tensor} tensor ranks"
            f" {rows * model.positions} lines each time",
            f"give a batch of at least {microbatches * -(-tensor // model.positions)} rows per replica",
        )


def check_tensors(shapes: Mapping[str, tuple[int, ...]], job: PrivateJob, model: ModelSpec) -> None:
    """Refuse (ConfigError naming the tensor) inputs that are not what the job works on."""
    if job.task in ("infer", "serve"):
        wanted = {f"weight.{i}": layer.weight_shape for i, layer in enumerate(model.weights)}
        for name, shape in wanted.items():
            if shapes.get(name) != shape:
                raise ConfigError(
                    f"{name} has shape {shapes.get(name)}, {model.name} takes {shape}", "share that model's own weights"
                )
        if job.task == "serve":
            if QUERY in shapes:
                raise ConfigError(
                    "queries are among the inputs of a served model", "its clients ask it; leave job.data out"
                )
            return
        _check_rows(shapes, QUERY, model, model.features, None)
        steps = -(-shapes[QUERY][0] // job.batch)
        if job.steps != steps:
            raise ConfigError(f"job.steps is {job.steps} for {shapes[QUERY][0]} queries", f"give steps: {steps}")
        return
    if not job.val_rows and any(name.startswith("val_") for name in shapes):
        raise ConfigError("there are rows for validation, and job.val_rows is 0", "share them for this job")
    if TRAIN_WEIGHTS in shapes and not carries_weights(job):
        raise ConfigError("the rows have weights, and the job says nothing of them", "share them for this job")
    for part in ("train", "test", *(("val",) if job.val_rows else ())):
        x, y = f"{part}_x", f"{part}_y"
        _check_rows(shapes, x, model, model.features, None)
        if model.targets:
            _check_rows(shapes, y, model, model.targets, shapes[x][0])
        elif y in shapes:
            raise ConfigError(f"the inputs have {y}, and {model.name} learns no target", "share the rows without it")
    clusters = kmeans_of(model)
    if clusters is not None and shapes["train_x"][0] < clusters.clusters * job.min_rows:
        what = f"{clusters.clusters} clusters of {shapes['train_x'][0]} training rows, and job.min_rows {job.min_rows}"
        raise ConfigError(what, "fewer clusters, or more rows")
    if carries_weights(job):
        _check_rows(shapes, TRAIN_WEIGHTS, model, 1, shapes["train_x"][0])


def check_held_out(job: PrivateJob, test: int, validation: int, *, some: bool) -> None:
    """Refuse (ConfigError) rows held out that are not as many as the job says; ``some``: they are one of several
    owners', and may be fewer."""
    for what, key, found, wanted in (
        ("test", "test", test, job.test_rows),
        ("validation", "val", validation, job.val_rows),
    ):
        if found != wanted and not (some and found < wanted):
            raise ConfigError(
                f"job.{key}_rows is {wanted}, the schema puts {found} rows into the {what}",
                f"give {found}, or change split.{what} in the schema",
            )


def check_counts(shapes: Mapping[str, tuple[int, ...]], job: PrivateJob) -> None:
    """Refuse (ConfigError) fewer rows, of all owners together, than a revealed number must be of.

    Where several owners share files without a schema, each holds out as many as the job says.
    """
    least = {"test": job.min_rows, "val": max(job.val_rows, job.min_rows)} if job.task == "train" else {}
    if STANDARD_ERRORS in job.reveal and job.task == "train":
        least["train"] = max(job.min_rows, shapes.get("train_x", (0, 0))[1] + 2)  # more rows than coefficients
    for part, wanted in least.items():
        found = shapes.get(f"{part}_x", (wanted,))[0]
        if found < wanted:
            what = f"the inputs have {found} {part} rows, a revealed number must be of {wanted}"
            raise ConfigError(what, "share more of them, or reveal less")


def check_statistics(shapes: Mapping[str, tuple[int, ...]], job: PrivateJob) -> None:
    """Refuse (ConfigError) statistics of fewer rows, or more, than there may be; ``shapes``: of all owners' rows."""
    rows = shapes["train_x"][0] if job.standardise else 0
    if job.standardise and not STANDARDISED_LEAST <= rows <= STANDARDISED_ROWS:
        many = f"{STANDARDISED_LEAST} to {STANDARDISED_ROWS} training rows"
        raise ConfigError(f"job.standardise over {rows} rows", f"{many}, or scale the columns beforehand")
    if "statistics" in job.reveal and rows < job.min_rows:
        raise ConfigError(f"statistics of {rows} rows would be revealed, job.min_rows is {job.min_rows}")


def _check_rows(
    shapes: Mapping[str, tuple[int, ...]], name: str, model: ModelSpec, width: int, rows: int | None
) -> None:
    shape = shapes.get(name)
    if shape is None:
        raise ConfigError(f"the inputs lack {name}", "share them again, or name its owner's share, too")
    if len(shape) != 2 or shape[1] != width or not shape[0] or (rows is not None and shape[0] != rows):
        raise ConfigError(
            f"{name} has shape {shape}, {model.name} takes ({rows or 'rows'}, {width})", "share other data"
        )


def shapes_of(tensors: Mapping[str, Ring] | Mapping[str, tuple[Ring, Ring]]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, of tensors or of a party's pairs of components."""
    return {n: tuple((t if isinstance(t, np.ndarray) else t[0]).shape) for n, t in tensors.items()}
