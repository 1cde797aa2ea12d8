"""The card that goes with an opened model: what it is, how it was trained, what was told of it, and what that is worth.

Everything in it is the signed policy's or the certificate's; nothing of the data is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from uvcc_console.core.answers.shown import Shown
from uvcc_console.plan.owndata import model_words
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.early_stop import Course
from uvcc_engine.contract.job.private_job import SEALED
from uvcc_engine.contract.text import in_markdown
from uvcc_engine.transcript.terms.policy import EVERYBODY, Policy

_TRAINING: Final = (
    *("objective", "optimizer", "steps", "batch", "lr", "schedule", "warmup", "momentum", "beta2", "weight_decay"),
    *("clip_norm", "class_weights", "label_smoothing", "row_weights", "frac_bits", "seed"),
)
_FILES: Final = {
    owner_files.TENSORS: "the weights, opened for the owner: `weight.N`, inputs (and a last row of biases) by outputs",
    owner_files.WEIGHTS: "the same, for `uvcc owner predict` and for jobs of task infer",
    owner_files.MODEL: "the model's graph: layers and sizes, as the policy binds them",
    owner_files.COEFFICIENTS: "the coefficients with their standard errors; the intercept is the last",
    owner_files.ADAPTERS: "what was trained in secret beside the public base; merged with it, it is the model here",
    owner_files.PREPROCESSING: "the schema with the statistics of the training rows: keep it as you keep the data",
    owner_files.TOKENIZER: "your own tokenizer, which the schema names: the model reads a text by it",
}

_OF_CENTROIDS: Final = {
    owner_files.TENSORS: "the centroids, opened for the owner: in the rows of `weight.0`, as the features are scaled"
}


def model_card(policy: Policy, found: Shown, files: Sequence[str], course: Course | None = None) -> str:
    """Markdown. ``found`` is the full phase's result; ``files`` are those that lie beside the card; ``course`` is how a
    training with validation went."""
    job, model = policy.job, policy.job.get("model", "")
    lines = ["# Model card", "", f"{in_markdown(model_words(model))}.", "", f"- result: {found.words(utc=True)}"]
    lines += [f"- {in_markdown(name)}: {value:.6g}" for name, value in sorted(found.values.items())]
    told = _FILES | (_OF_CENTROIDS if model_words(model) == "kmeans" else {})
    lines += ["", "## Files", "", *(f"- `{name}`: {told[name]}" for name in sorted(files) if name in told)]
    lines += [
        "",
        "## Training",
        "",
        *_shapes(model),
        *(f"- {k}: {in_markdown(str(job[k]))}" for k in _TRAINING if k in job),
    ]
    lines += [f"- {line}" for line in validation_lines(job, course)] if course is not None else []
    lines += [
        *("", "## Evidence", "", f"- policy: {policy.hash.hex()}", f"- code: {policy.code_hash}"),
        *(f"- {name}: {value}" for name, value in _roots(found).items()),
        "- check it: `uvcc verify RUN`",
    ]
    lines += ["", "## Privacy", "", *(f"- {in_markdown(line)}" for line in _privacy(policy))]
    return "\n".join(lines) + "\n"


def validation_lines(job: Mapping[str, Any], course: Course) -> list[str]:
    """When the revealed validation ended the training, and which step's weights were released."""
    lines = []
    if course.steps < job["steps"]:
        fell = f"the validation loss had not fallen {job['patience']} times in a row"
        lines.append(f"ended: after {course.steps} of {job['steps']} steps, when {fell}")
    if job.get("keep_best") and course.best:
        lines.append(
            f"weights: those after {course.best} steps, whose validation loss was the least: {course.least:.6g}"
        )
    return lines


def _shapes(model: Any) -> list[str]:
    if not isinstance(model, Mapping):
        return []
    return ["- " + in_markdown(f"features: {model.get('features')}, outputs: {model.get('classes')}")]


def _roots(found: Shown) -> dict[str, str]:
    named = {"global root": found.global_root, "run root": found.run_root, "session": found.sid_job}
    named |= {"result hash": found.hashes[0] if len(found.hashes) == 1 else ""}
    return {name: value for name, value in named.items() if value}


def _privacy(policy: Policy) -> list[str]:
    told = [value for value, to in policy.reveal if to == EVERYBODY and not value.startswith("confusion.")]
    owners = [value for value, to in policy.reveal if to != EVERYBODY]
    sealed = [value for value in SEALED if value in told]  # said to all, and still sealed to it
    told, owners = [value for value in told if value not in sealed], [*owners, *sealed]
    return [
        f"told to all three domains: {', '.join(told) or 'nothing'}; all else stayed shared",
        f"sealed to the owner's key: {', '.join(dict.fromkeys(owners)) or 'nothing'}",
        "two domains that put their shares together learn data and weights",
        *policy.operation.sentences(policy.proving),
        "weights remember training data: whoever gets them can test guesses about single rows; no noise was added",
    ]
