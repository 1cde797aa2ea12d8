"""The data owner's command: split the inputs, seal two components to each party, publish the commitments; open results.

Runs where the data is. What leaves are three files, each readable by one party only and none sufficient alone, and
``commitments.json``, which the policy binds.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.machine.help_text import HelpFormatter
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.coefficient_errors import standard_errors
from uvcc_engine.data.data_files import read_arrays, read_queries, read_rows
from uvcc_engine.data.features import feature_names
from uvcc_engine.data.fitting_pass import check_joint
from uvcc_engine.data.sample_text import load_text
from uvcc_engine.data.schema import load_schema
from uvcc_engine.data.schema_text import write_fitted
from uvcc_engine.data.sets import Dataset, Floats, Labels, load_digits, split
from uvcc_engine.model.definition.base_model import attached, merged, read_base
from uvcc_engine.model.definition.column_embeddings import behind_embeddings
from uvcc_engine.model.definition.layer_list import check_labels, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.owner.own_data import FITTED, prepared
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.inputs import SharedInputs, dataset_tensors, encode_fixed, share_tensors
from uvcc_engine.sealing.joint import combine
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sealing.release import box_name, open_weights
from uvcc_engine.sharding.partition import join_weight, place_layers, weights_of
from uvcc_engine.sharding.validation import (
    PREDICTION,
    QUERY,
    check_held_out,
    check_inputs,
    check_tensors,
    fit_model,
    shapes_of,
)
from uvcc_engine.transcript.signing.identity import PUBLIC, Identity, PublicIdentity
from uvcc_engine.transcript.terms.policy import Policy

TENSORS: Final = owner_files.TENSORS


def dataset_for(
    job: PrivateJob,
    path: Path | None = None,
    labels: Path | None = None,
    schema: Path | None = None,
    pin: Path | None = None,
    fitted: Path | None = None,
) -> Dataset:
    """The rows a job trains on: the packaged digits, or the owner's file, split by the job's public seed.

    With a ``schema`` that says how a table is split and scaled; the statistics are written to ``fitted``.

    Raises ConfigError if the rows do not fit the model.
    """
    model = fit_model(job)
    if schema is not None:
        data = _by_schema(job, path, schema, pin, fitted)
    elif path is None and model.positions > 1:
        data = load_text(job.seed, job.test_rows, model.positions, val_rows=job.val_rows)
    elif path is None:
        data = load_digits(job.seed, job.test_rows, job.val_rows)
    else:
        x, y = read_rows(path, labels)
        data = split(x, y, job.seed, job.test_rows, model.classes, job.val_rows)
    check_labels(model, data.classes)
    if data.train_x.shape[1] != model.features or data.classes != model.labels:
        raise ConfigError(
            f"the data has {data.train_x.shape[1]} features and {data.classes} classes,"
            f" {model.name} takes {model.features} and {model.labels}",
            "choose a model that fits the data, or name the data file",
        )
    return data


def _by_schema(job: PrivateJob, path: Path | None, schema: Path, pin: Path | None, fitted: Path | None) -> Dataset:
    if path is None:
        raise ConfigError("there is a schema, and no data that it describes", "name the table with --data")
    plan = load_schema(schema)
    check_joint(plan, job.standardise)
    behind_embeddings(plan, fit_model(job), whole=True)
    made = prepared(path, schema, pin)
    own = made.schema.text.sha256 if made.schema.text is not None else ""
    if own != job.tokenizer:
        what = f"the schema's tokenizer has the hash {own or 'of none'}, the job's is {job.tokenizer or 'none'}"
        raise ConfigError(what, "take the tokenizer that the run was planned with, or plan it anew")
    parts = {name: len(x) for name, (x, _) in made.data.parts.items()}
    check_held_out(job, parts["test"], parts.get("val", 0), some=plan.fixed)
    if fitted is not None:
        write_fitted(fitted, made.schema)
    return made.data


def load_owner(folder: Path, seed: int | None) -> Identity:
    """The owner's key pair in ``folder`` (0700, keys 0600); made there at first use, from ``seed`` if one is given."""
    if (folder / PUBLIC).exists():
        return Identity.load(folder)
    if seed is None:
        return Identity.create(folder)
    return Identity.create_seeded(folder, f"uvcc-data-owner-{seed}".encode())


def load_parties(path: Path) -> list[tuple[PublicIdentity, ...]]:
    """Three public identities per replica, p0 first; replica 0 comes first. Raises UnreadableError."""
    wanted = "a JSON list of three public identities per replica"
    try:
        found: Any = json_of(path.read_text())
    except (OSError, ValueError) as error:
        raise UnreadableError(f"cannot read {path}: {error}", wanted) from error
    if not isinstance(found, list) or not found or len(found) % 3 or not all(isinstance(item, dict) for item in found):
        raise UnreadableError(f"{path} is not a list of identities, three per replica", wanted)
    pods = [PublicIdentity.from_json(item) for item in found]
    return [tuple(pods[i : i + 3]) for i in range(0, len(pods), 3)]


def sealed_name(party: int, replica: int = 0) -> str:
    """Name of the file for one party's pod."""
    return f"sealed-p{party}.bin" if not replica else f"sealed-p{party}r{replica}.bin"


def write_shared(shared: SharedInputs, out: Path) -> list[str]:
    """Write a sealed file per party and pod, and ``commitments.json``; returns their names."""
    out.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    for replica, boxes in enumerate((shared.boxes, *shared.replicas)):
        for party, box in enumerate(boxes):
            names.append(sealed_name(party, replica))
            files.write_atomic(out / names[-1], box, mode=0o600, durable=False)
    files.write_json(out / owner_files.COMMITMENTS, shared.public(), durable=False)
    return [*names, owner_files.COMMITMENTS]


def share(args: argparse.Namespace) -> dict[str, Any]:
    """Split, seal and write; returns what the policy binds, the files and the row counts."""
    job = PrivateJob.from_json(files.read_json(args.job))
    tensors = input_tensors(job, args)
    owner = load_owner(args.owner, args.seed)
    parties, *replicas = load_parties(args.parties)
    purpose = Purpose.of(job, _owners(args.owners, owner))
    shared = share_tensors(tensors, job.frac_bits, parties, owner, args.seed, replicas=replicas, purpose=purpose)
    names = write_shared(shared, args.out)
    return shared.public() | {"files": names, "rows": _rows(tensors)}


def _owners(listed: Sequence[Path], owner: Identity) -> list[str]:
    """The X25519 keys of all owners in their order; this one's alone where none are listed. Raises ConfigError."""
    keys = [PublicIdentity.from_json(files.read_json(path)).x25519 for path in listed] or [owner.public.x25519]
    if owner.public.x25519 not in keys or len(set(keys)) != len(keys):
        raise ConfigError("--owners names this owner not at all, or somebody twice", "public.json of each, in order")
    return keys


def _rows(tensors: Mapping[str, Ring]) -> dict[str, int]:
    return {name.removesuffix("_x"): len(tensors[name]) for name in tensors if name.endswith("_x")}


def input_tensors(job: PrivateJob, args: argparse.Namespace) -> dict[str, Ring]:
    """What this owner contributes, by name, in fixed point: rows to train on, or queries, or a model's weights.

    Raises ConfigError naming a tensor that does not fit the job or the fixed-point range.
    """
    model = fit_model(job)
    if job.join is not None:
        raise ConfigError("job.join is of several owners' columns", "each runs uvcc owner share, for one proposal")
    if job.task == "train":
        data = dataset_for(job, args.data, args.labels, args.schema, args.pin, args.fitted)
        for part, (x, _) in data.parts.items():
            check_inputs(job, f"{part} features", x)
        tensors = dataset_tensors(data, job.frac_bits, job)
        check_tensors(shapes_of(tensors), job, model)
        return tensors
    found: dict[str, Ring] = {}
    if args.data is not None:
        queries = read_queries(args.data)
        check_inputs(job, "queries", queries)
        found[QUERY] = encode_fixed("queries", queries, job.frac_bits)
    if args.weights is not None:
        for name, weight in read_arrays(args.weights).items():
            found[name] = encode_fixed(name, weight, job.frac_bits)
    if not found:
        raise ConfigError("nothing to share for this job", "name the queries with --data, the model with --weights")
    if (args.data is not None or job.task == "serve") and args.weights is not None:
        check_tensors(shapes_of(found), job, model)
    return found


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Whether a job and this owner's data fit, without keys and parties; what ``--check`` prints."""
    job = PrivateJob.from_json(files.read_json(args.check))
    size = {name: getattr(args, name) for name in ("workers", "replicas", "stages", "tensor", "microbatches")}
    model = fit_model(job, **size)
    rows = {} if job.task != "train" and not (args.data or args.weights) else _rows(input_tensors(job, args))
    return {"ok": True, "model": model.name, "weights": [list(w.weight_shape) for w in model.weights], "rows": rows}


def combine_owners(args: argparse.Namespace) -> dict[str, Any]:
    """Lay several owners' sealed files side by side; the first owner is the one that results go to."""
    shared = combine([_read_shared(folder) for folder in args.combine])
    return shared.public() | {"files": write_shared(shared, args.out)}


def _read_shared(folder: Path) -> SharedInputs:
    found: Any = files.read_json(folder / owner_files.COMMITMENTS)
    replica, boxes = 0, []
    try:
        while (folder / sealed_name(0, replica)).exists():
            first, second, third = ((folder / sealed_name(p, replica)).read_bytes() for p in range(3))
            boxes.append((first, second, third))
            replica += 1
        c0, c1, c2 = (str(c) for c in found["commitments"])
        return SharedInputs(boxes[0], (c0, c1, c2), str(found["owner"]), tuple(boxes[1:]))
    except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise UnreadableError(f"{folder} holds no owner's sealed files: {error}", "share into it first") from error


def _workers_below(folder: Path) -> list[tuple[int, int]]:
    """(stage, tensor rank) of the first replica's workers whose boxes lie below a folder; at least the first one."""
    names = (path.name.removesuffix(".box").removeprefix("result_") for path in folder.rglob(box_name("p*r0s*t*")))
    coords = {(c.stage, c.tensor) for c in map(Coord.parse, names)}
    return sorted(coords | {(0, 0)})


def _workers_of(size: Topology) -> list[tuple[int, int]]:
    """The same of all workers that a run of this topology has."""
    return [(stage, tensor) for stage in range(size.stages) for tensor in range(size.tensor)]


def _only_box(folder: Path, coord: str) -> bytes:
    found = sorted(folder.rglob(box_name(coord)))
    if len(found) != 1:
        raise UnreadableError(f"{len(found)} files {box_name(coord)} under {folder}", "collect one run's results there")
    return found[0].read_bytes()


def whole_weights(slices: Mapping[tuple[int, int], Mapping[str, Floats]], model: str | None) -> dict[str, Floats]:
    """The weights of all stages, each put together from its tensor ranks' slices as that model is split."""
    size = 1 + max(tensor for _, tensor in slices)
    if size > 1 and model is None:
        raise ConfigError(f"these weights lie in slices of {size} tensor ranks", "name the job's model with --model")
    by_name: dict[str, list[Floats]] = {}
    for _, mine in sorted(slices.items()):
        for name, weight in mine.items():
            by_name.setdefault(name, []).append(weight)
    if size == 1:
        return {name: parts[0] for name, parts in by_name.items()}
    placed = {f"weight.{p.weight}": p for p in weights_of(place_layers(find_model(str(model)), size)[0])}
    if by_name.keys() != placed.keys() or any(len(parts) != size for parts in by_name.values()):
        raise ConfigError(f"the boxes hold {sorted(by_name)}, {model} has {sorted(placed)}", "name the job's model")
    return {name: join_weight(one, by_name[name]) for name, one in placed.items()}


def open_results(args: argparse.Namespace) -> dict[str, Any]:
    """Open the three parties' sealed results anywhere below a folder; write them (0600).

    ``weights.npz`` and ``model.safetensors`` by name (with a ``base`` those of the merged model, and what was trained
    as ``adapters.safetensors``), or ``predictions.npz`` with one label per query; of one output the number itself, 1 or
    0 where two classes are learnt.
    """
    owner, parties = Identity.load(args.owner), load_parties(args.parties)[0]
    slices: dict[tuple[int, int], dict[str, Floats]] = {}
    policy = None if args.policy is None else Policy.load(args.policy)
    session = None if policy is None else policy.sid_job.hex()
    for stage, tensor in _workers_below(args.open) if policy is None else _workers_of(policy.topology):
        boxes = [_only_box(args.open, f"p{party}r0s{stage}t{tensor}") for party in range(len(parties))]
        slices[stage, tensor] = open_weights(
            boxes, owner=owner, parties=parties, sid_job=session, stage=stage, tensor=tensor
        )
    weights = whole_weights(slices, args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    information = [weights.pop(name) for name in owner_files.INFORMATION_TENSORS if name in weights]
    names = _put_statistics(weights, args.out)
    if args.base is not None and PREDICTION not in weights:
        weights = _merged(weights, args, names)
    answers = weights.get(PREDICTION)
    name = owner_files.WEIGHTS if answers is None else "predictions.npz"
    content = io.BytesIO()
    np.savez(content, **(weights if answers is None else _predicted(answers)))
    files.write_atomic(args.out / name, content.getvalue(), mode=0o600)
    names.append(name)
    if answers is None:
        names.append(TENSORS)
        whole = {name: np.ascontiguousarray(weight) for name, weight in weights.items()}
        files.write_atomic(args.out / TENSORS, save(whole, {"format": "uvcc"}), mode=0o600)
    notes = put_coefficients(weights, information, args, names) if information else []
    return {"files": names, "shapes": {name: list(w.shape) for name, w in weights.items()}, "notes": notes}


def _predicted(answers: Floats) -> dict[str, Labels]:
    return {"labels": answers.argmax(1)} if answers.shape[1] > 1 else {"values": answers[:, 0]}


def _merged(trained: dict[str, Floats], args: argparse.Namespace, names: list[str]) -> dict[str, Floats]:
    """The weights of an ordinary model that computes what the base and what was trained beside it do.

    What was trained is written as it is, and the ordinary model's graph; ``names`` gets their names.
    """
    if args.model is None:
        raise ConfigError("a public base, and no model that names its tensors", "name the job's model with --model")
    model = attached(find_model(args.model), read_base(args.base, args.base_sha256))
    if {n: w.shape for n, w in trained.items()} != {f"weight.{i}": w.weight_shape for i, w in enumerate(model.weights)}:
        raise ConfigError("what was opened are not the weights of the model", "name the job's model with --model")
    plain, whole = merged(model, [trained[f"weight.{i}"] for i in range(len(trained))])
    content = save({n: np.ascontiguousarray(w) for n, w in trained.items()}, {"format": "uvcc"})
    files.write_atomic(args.out / owner_files.ADAPTERS, content, mode=0o600)
    graph = json.dumps(model_to_json(plain), indent=1, sort_keys=True) + "\n"
    files.write_atomic(args.out / owner_files.MODEL, graph.encode(), mode=0o600)
    names += [owner_files.ADAPTERS, owner_files.MODEL]
    return {f"weight.{i}": weight for i, weight in enumerate(whole)}


def put_coefficients(
    weights: dict[str, Floats], information: list[Floats], args: argparse.Namespace, names: list[str]
) -> list[str]:
    """Write a regression's coefficients with their standard errors, by the schema's names if it is given; ``names``
    gets the file's. What is to be said of them.

    Raises VerificationError where what was opened is no regression's.
    """
    weight = weights["weight.0"].reshape(-1)
    if len(information) != 2 or information[0].shape != (len(weight), len(weight)) or information[1].size != 3:
        raise VerificationError("standard errors", "what was opened is not of these weights", "ask for the run's boxes")
    called = feature_names(load_schema(args.schema)) if args.schema else []
    if len(called) != len(weight) - 1:
        called = [f"feature {i}" for i in range(len(weight) - 1)]
    errors = standard_errors(information[0], information[1])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("name", "coefficient", "standard_error", "z"))
    for i, name in enumerate([*called, "(intercept)"]):
        told = ("", "") if errors is None else (f"{errors[i]:.6g}", f"{weight[i] / errors[i]:.4g}")
        writer.writerow((name, f"{weight[i]:.6g}", *told))
    files.write_atomic(args.out / owner_files.COEFFICIENTS, text.getvalue().encode(), mode=0o600)
    names.append(owner_files.COEFFICIENTS)
    if errors is not None:
        return []
    return ["no standard errors: a column nearly follows from the others; leave it out (one value of a one-hot column)"]


def _put_statistics(weights: dict[str, Floats], out: Path) -> list[str]:
    """Take the columns' statistics out of what was opened, and write them as mean (or least, or lower quantile) and
    deviation (or width); the file's name."""
    named = next((pair for pair in owner_files.STATISTIC_TENSORS.values() if set(pair) <= weights.keys()), None)
    if named is None:
        return []
    found = [weights.pop(name).reshape(-1) for name in named]
    content = io.BytesIO()
    shift, size = owner_files.STATISTIC_WORDS[named[0]]
    values: dict[str, Any] = {shift: found[0], size: 1.0 / np.maximum(found[1], np.finfo(np.float64).tiny)}
    np.savez(content, **values)
    files.write_atomic(out / owner_files.STATISTICS, content.getvalue(), mode=0o600)
    return [owner_files.STATISTICS]


def main(argv: Sequence[str] | None = None) -> int:
    """``uvcc-engine share``: returns the exit code; the summary goes to stdout as one JSON line."""
    parser = RaisingParser(
        prog="uvcc-engine share",
        description="The data owner's tool: split inputs and seal them to the parties, or open the results.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--parties", type=Path, help="JSON list of public identities, three per replica")
    parser.add_argument("--owner", type=Path, help="folder of the owner's key pair (made if missing)")
    parser.add_argument(
        "--owners",
        type=Path,
        nargs="+",
        default=[],
        metavar="PUBLIC",
        help="public.json of every owner of the job, in order, the one first who gets the results; alone without it",
    )
    parser.add_argument("--out", type=Path, help="folder for the sealed files and commitments.json")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--job", type=Path, help="share the inputs of this job (JSON, as in the profile's `job`)")
    what.add_argument("--open", type=Path, help="open the sealed results under this folder into OUT")
    what.add_argument("--check", type=Path, metavar="JOB", help="only say whether this job and the data fit")
    what.add_argument("--combine", type=Path, nargs="+", metavar="OUT", help="put several owners' shares together")
    parser.add_argument("--weights", type=Path, help="the model's weights (.npz), where the job's task is infer")
    parser.add_argument("--model", help="with --open: the job's model, where tensor ranks hold slices of its weights")
    parser.add_argument("--policy", type=Path, help="with --open: the run's signed policy, whose results alone count")
    parser.add_argument("--base", type=Path, help="with --open: the job's public base, which the weights belong to")
    parser.add_argument("--base-sha256", default="", help="the hash that the base must have")
    parser.add_argument("--workers", type=int, default=1, help="with --check: workers per party, times microbatches")
    parser.add_argument("--replicas", type=int, default=1, help="with --check: replicas per party")
    parser.add_argument("--stages", type=int, default=1, help="with --check: pipeline stages")
    parser.add_argument("--tensor", type=int, default=1, help="with --check: tensor ranks")
    parser.add_argument("--microbatches", type=int, default=1, help="with --check: microbatches of a replica's batch")
    parser.add_argument("--data", type=Path, help=".npz, .npy, .csv, .pt or IDX file; the packaged digits without it")
    parser.add_argument("--labels", type=Path, help="labels file, where --data holds one array only")
    parser.add_argument(
        "--schema", type=Path, help="what the columns of --data are: uvcc-engine table infer writes one"
    )
    parser.add_argument("--pin", type=Path, help="with --schema: refuse files other than those that this plan names")
    parser.add_argument("--fitted", type=Path, help=f"with --schema: where its statistics are written, like {FITTED}")
    parser.add_argument("--seed", type=int, help="make keys and shares deterministic (demonstrations, reruns)")
    args = parser.parse_args(argv)
    needs = [] if args.check else ["out"] if args.combine else ["parties", "owner", "out"]
    for name in needs:
        if getattr(args, name) is None:
            parser.error(f"--{name} is needed here")
    act = check if args.check else combine_owners if args.combine else open_results if args.open else share
    try:
        if args.weights is None and args.open is None:
            args.schema = owner_files.named_schema(args.data, args.schema)
        print(json.dumps(act(args)))
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
