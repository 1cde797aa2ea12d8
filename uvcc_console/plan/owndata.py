"""What a profile leaves to the data owner's own data: the owner's program reads it, in a process of its own.

The console never sees a row: it learns how many features, classes and test rows there are, and the model's shapes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from uvcc_console.plan.exit_words import ended_how
from uvcc_console.plan.schema import PrivateJobSettings, Profile
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job import kmeans_job, owner_files
from uvcc_engine.contract.run_files import files

LIMIT_S: Final = 300.0
REHEARSAL_S: Final = 1800.0  # a step of a large model, on three parties at once and in clear
REHEARSE: Final = "rehearse"


def pin_file(run_dir: Path) -> Path:
    """Digests of the data and schema that the run was planned with, beside the owner's keys."""
    return run_dir / "owner" / "data.json"


def fitted_file(run_dir: Path) -> Path:
    """The schema with the statistics of the training rows; the owner's, on no pod and in no bundle."""
    return run_dir / "owner" / owner_files.PREPROCESSING


def give_fitted(fitted: Path, out: Path) -> None:
    """Copy the fitted schema to a folder, and the tokenizer that lies beside it, where there are such."""
    for one in (fitted, fitted.with_name(owner_files.TOKENIZER)):
        if one.exists():
            shutil.copyfile(one, out / one.name)
            (out / one.name).chmod(0o600)


def settle(
    profile: Profile, tell: Callable[[str], None], *, elsewhere: bool = False
) -> tuple[Profile, Mapping[str, str] | None]:
    """The profile with what follows from the data filled in, and what its files are held to from now on.

    ``elsewhere``: data owners share their rows from their own machines. ``tell`` is given what the model does otherwise
    than the torch module that it was taken from, and what follows from the target's kind.

    Raises UvccError with the owner's program's own words: the row, the column, the layer, and what to do.
    """
    job = profile.job
    if isinstance(job, PrivateJobSettings) and isinstance(job.model, str) and job.model.endswith(".json"):
        profile = profile.model_copy(update={"job": (job := job.model_copy(update={"model": _graph(job.model)}))})
    if isinstance(job, PrivateJobSettings) and job.task == "train" and job.data:
        owner_files.named_schema(Path(job.data).expanduser(), Path(job.data_schema) if job.data_schema else None)
    if not isinstance(job, PrivateJobSettings) or not (
        job.data_schema or job.epochs or job.base or _left_open(job.model)
    ):
        if isinstance(job, PrivateJobSettings) and not elsewhere:
            _check_packaged(job)
        return profile, None
    if job.base and job.task != "train":
        return _answering(profile, job, tell), None
    asked = job.model if isinstance(job.model, str) else json.dumps(job.model)
    command = ["plan", "--model", asked]
    for flag, path in (("--data", job.data), ("--schema", job.data_schema), ("--labels", job.labels)):
        command += [flag, str(Path(path).expanduser())] if path else []
    command += ["--columns", str(sum(job.join.columns)), "--outputs", str(job.join.outputs)] if job.join else []
    command += [*_of_base(job), *(["--elsewhere"] if elsewhere else [])]
    found = json.loads(owners_program(command))
    for note in found.get("notes", []):
        tell(f"{job.base or job.model}: {note}")
    changes: dict[str, Any] = {"model": found["model"], "base_sha256": found.get("base", "")}
    if "rows" in found:
        held = {"test_rows": found["rows"]["test"], "val_rows": found["rows"].get("val", 0)}
        changes |= _of_tokenizer(job, found["tokenizer"])
        changes |= held | _of_target(job, found["objective"], tell) | _of_weight(job, found["weight"], tell)
    whole = _whole_batch(found, profile.topology.replicas)
    changes |= _of_trees(job, found, whole, tell) | _of_kmeans(job, found, whole, tell)
    if job.epochs:
        if not found.keys() & {"rows", "total"}:
            raise ConfigError("job.epochs, and no data whose rows could be counted", "give job.steps")
        rows = found["rows"]["train"] if "rows" in found else max(1, found["total"] - job.test_rows - job.val_rows)
        batch = changes.get("batch", job.batch) * profile.topology.replicas
        changes["steps"] = -(-job.epochs * rows // batch)
        if not job.val_every and changes.get("val_rows", job.val_rows):
            changes["val_every"] = -(-rows // batch)
    settled = job.model_copy(update=changes).of_rows(found["rows"]["train"] if "rows" in found else 0)
    return profile.model_copy(update={"job": settled}), found.get("pin")


def _check_packaged(job: PrivateJobSettings) -> None:
    """Refuse (ConfigError) a training that names no data, and whose model takes other rows than the packaged ones."""
    if job.task != "train" or job.data or job.join or "model" not in job.model_fields_set:
        return
    asked = job.model if isinstance(job.model, str) else json.dumps(job.model)
    try:
        owners_program(["plan", "--model", asked])
    except ConfigError as e:
        what = f"job.data names no rows, and the packaged ones do not fit: {e.what}"
        raise ConfigError(what, "of rows that owners share from elsewhere: uvcc plan --elsewhere") from e


def _of_base(job: PrivateJobSettings) -> list[str]:
    """What the owner's program is told of a public base."""
    if not job.base:
        return []
    asked = json.dumps(job.adapters.model_dump(mode="json"))
    return ["--base", _path(job.base), "--base-sha256", job.base_sha256, "--adapters", asked]


def _path(said: str) -> str:
    return str(Path(said).expanduser())


def _graph(path: str) -> dict[str, Any]:
    """The model that a file holds as JSON, as ``uvcc owner open`` writes it. Raises UnreadableError, ConfigError."""
    found = files.read_json(Path(path).expanduser())
    if not isinstance(found, dict) or "layers" not in found:
        raise ConfigError(f"job.model: {path} holds no model", "name a model.json that uvcc owner open wrote")
    return found


def _answering(profile: Profile, job: PrivateJobSettings, tell: Callable[[str], None]) -> Profile:
    """A profile that answers queries with a public base. Its model is that of the training with the same ``adapters``
    where it does not say another; the base's file is held to its hash."""
    if "model" in job.model_fields_set:
        return _with_base_hash(profile, job)
    weights = ["--weights", _path(job.weights)] if job.weights else []
    found = json.loads(owners_program(["answers", *_of_base(job), *weights]))
    for note in found["notes"]:
        tell(f"{job.base}: {note}")
    changes = {"model": found["model"], "base_sha256": found["base"]}
    return profile.model_copy(update={"job": job.model_copy(update=changes)})


def _with_base_hash(profile: Profile, job: PrivateJobSettings) -> Profile:
    """A profile that answers queries with a base: its model names the tensors, and the file is held to its hash."""
    digest = _digest(Path(job.base).expanduser())
    if job.base_sha256 not in ("", digest):
        raise ConfigError(
            f"{job.base} has the hash {digest}, job.base_sha256 is {job.base_sha256}", "give its own file"
        )
    return profile.model_copy(update={"job": job.model_copy(update={"base_sha256": digest})})


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise UvccError(f"cannot read the public base {path}: {e.strerror}", "name it in job.base") from e


def keep_base(run_dir: Path, profile: Profile) -> None:
    """Copy the public base to the run's folder, from where pods get it. Raises UvccError if it changed meanwhile."""
    job = profile.job
    if not isinstance(job, PrivateJobSettings) or not job.base:
        return
    kept = run_dir / owner_files.BASE
    try:
        shutil.copyfile(Path(job.base).expanduser(), kept)
    except OSError as e:
        raise UvccError(f"cannot copy {job.base} to {kept}: {e.strerror}", "set UVCC_HOME to a writable folder") from e
    if _digest(kept) != job.base_sha256:
        raise UvccError(f"{job.base} changed while the run was planned", "start the run again")


def _of_target(job: PrivateJobSettings, objective: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """What the schema's target asks of a job that says nothing else: its objective, and errors in place of accuracy."""
    changes: dict[str, Any] = {}
    if "objective" not in job.model_fields_set and objective != job.objective:
        tell(f"objective {objective}: so the schema's target asks")
        changes["objective"] = objective
    if objective in _UNITS and "accuracy" in job.reveal:
        tell("rmse is revealed in place of accuracy: the target is a number" + _UNITS[objective])
        changes["reveal"] = [_FOR_NUMBERS.get(item, item) for item in job.reveal]
    if objective == kmeans_job.PLAIN["objective"] and "accuracy" in job.reveal:
        tell("inertia is revealed in place of accuracy: there is no target")
        changes["reveal"] = ["inertia" if item == "accuracy" else item for item in job.reveal]
    return changes


def _whole_batch(found: Mapping[str, Any], replicas: int) -> dict[str, int]:
    """A replica's batch where each step takes all training rows, if the data is known."""
    return {"batch": min(found["rows"]["train"], kmeans_job.MOST_ROWS) // replicas} if "rows" in found else {}


def _of_trees(
    job: PrivateJobSettings, found: Mapping[str, Any], whole: Mapping[str, int], tell: Callable[[str], None]
) -> dict[str, Any]:
    """What trees ask of a job that says nothing else: no momentum, one rate for all, and to be grown from all rows."""
    if _layers(found["model"]) != ["trees"]:
        return {}
    return _where_unsaid(job, {"momentum": 0.0, "schedule": "constant", **whole}, "trees ask", tell)


def _of_kmeans(
    job: PrivateJobSettings, found: Mapping[str, Any], whole: Mapping[str, int], tell: Callable[[str], None]
) -> dict[str, Any]:
    """What k-means asks of a job that says nothing else: steps of Lloyd's, of all training rows."""
    if _layers(found["model"]) != ["kmeans"] or "rows" not in found:
        return {}
    wanted = {key: value for key, value in kmeans_job.PLAIN.items() if key != "objective"}
    return _where_unsaid(job, {**wanted, **whole}, "k-means asks", tell)


def _layers(model: Any) -> list[str]:
    """The kinds of a model's layers."""
    return [layer["type"] for layer in model["layers"]] if isinstance(model, dict) else []


def _where_unsaid(
    job: PrivateJobSettings, wanted: Mapping[str, Any], who: str, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Those of ``wanted`` that the job does not say otherwise; ``tell`` is told which."""
    changes = {key: value for key, value in wanted.items() if key not in job.model_fields_set}
    if changes:
        tell(f"{who} for " + ", ".join(f"{key} {value}" for key, value in changes.items()))
    return changes


def _of_weight(job: PrivateJobSettings, column: str, tell: Callable[[str], None]) -> dict[str, Any]:
    """Whether rows have weights of their own: the schema says it. Raises ConfigError where the job says otherwise."""
    if job.row_weights and not column:
        raise ConfigError("job.row_weights, and the schema names no weight", "write weight: COLUMN into the schema")
    if column:
        tell(f"rows count as {column!r} says: so the schema's weight asks")
    return {"row_weights": bool(column)}


def _of_tokenizer(job: PrivateJobSettings, digest: str) -> dict[str, Any]:
    """The hash of the tokenizer that the schema's text is read by. Raises ConfigError where the job says otherwise."""
    if job.tokenizer not in ("", digest):
        what = f"the schema's tokenizer has the hash {digest or 'of none'}, job.tokenizer is {job.tokenizer}"
        raise ConfigError(what, "give the file that the profile means, or leave job.tokenizer out")
    return {"tokenizer": digest}


_FOR_NUMBERS: Final = {"accuracy": "rmse", "val_accuracy": "val_rmse"}
_UNITS: Final = {"mse": ", and its unit is the target's deviation in the training rows", "poisson": ""}


def _left_open(model: Any) -> bool:
    """Whether a model's shapes are still to be found: a list of layers, or a class in a file."""
    return isinstance(model, list) or (isinstance(model, str) and ".py:" in model)


def keep_pin(run_dir: Path, pin: Mapping[str, str] | None) -> None:
    """Write down what the owner's files are held to. Raises UvccError."""
    if pin is None:
        return
    path = pin_file(run_dir)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(json.dumps(dict(pin)))
    except OSError as e:
        raise UvccError(f"cannot write {path}: {e.strerror}", "set UVCC_HOME to a writable folder") from e


def owners_program_that_waits(args: Sequence[str], command: str, tell: Callable[[str], None]) -> str:
    """As ``owners_program``, for as long as it takes; ``tell`` hears what it says of its waits meanwhile."""
    with subprocess.Popen(
        [sys.executable, "-m", "uvcc_engine.cli", command, *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines: list[str] = []
        reading = threading.Thread(target=_pass_waits, args=(process.stderr, lines, tell), daemon=True)
        reading.start()
        try:
            said = process.stdout.read()
            reading.join()
            code = process.wait()
        except BaseException:
            process.kill()  # as subprocess.run does: nothing of it goes on behind whoever interrupted this
            raise
    _check_ended(code, lines)
    return said


def _pass_waits(said: IO[str], lines: list[str], tell: Callable[[str], None]) -> None:
    for line in said:
        if line.startswith(owner_files.WAITS):
            tell(line.strip())
        else:
            lines.append(line.strip())


def _check_ended(code: int, lines: Sequence[str]) -> None:
    """Raises UvccError with the last line that the owner's program said, if it failed."""
    if code and (code < 0 or not lines):
        raise UvccError(ended_how("the owner's program", code), "nothing was begun; start it again")
    if code:
        said = lines[-1].removeprefix("error: ")
        raise ConfigError(said) if code == ConfigError.exit_code else UvccError(said)


def owners_program(
    args: Sequence[str], command: str = "table", *, inherit: bool = False, limit_s: float | None = LIMIT_S
) -> str:
    """Run ``uvcc-engine COMMAND``; what it prints, or straight to this process's output. Raises UvccError."""
    slow = "is the data too large?"
    if command == REHEARSE:
        limit_s, slow = REHEARSAL_S, "a smaller job.batch makes the step shorter that is rehearsed"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "uvcc_engine.cli", command, *args],
            stdin=subprocess.DEVNULL,
            stdout=None if inherit else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        raise UvccError(f"the owner's program took longer than {limit_s:.0f} s", slow) from None
    _check_ended(done.returncode, done.stderr.strip().splitlines())
    return done.stdout or ""


def model_words(model: Any) -> str:
    """A model in a few words: its name, or the kinds of its layers."""
    if isinstance(model, str):
        return model
    layers = model.get("layers", []) if isinstance(model, Mapping) else model
    return " ".join(_layer_word(layer) for layer in layers) if isinstance(layers, list) else "?"


def _layer_word(layer: Any) -> str:
    if isinstance(layer, Mapping):
        return str(layer.get("type") or next(iter(layer), "?"))
    return str(layer)
