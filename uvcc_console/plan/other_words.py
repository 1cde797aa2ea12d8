"""Keys that other trainers have: what says the same here, or that nothing does."""

from __future__ import annotations

from typing import Final

_HELD_OUT: Final = "job.test_rows, or the schema's split.test, holds rows out; they are measured at the end, once"
_VALIDATED: Final = "job.val_rows, or the schema's split.validation; job.reveal lists val_loss, val_accuracy, ..."
_TARGET: Final = "the schema says it (target), see uvcc data infer"
_ROWS: Final = "the schema's weight names the column of what each row counts"
_STOP: Final = "job.patience: so many validations without a lower val_loss; see job.val_every and job.val_budget"
_LAYERS: Final = "job.model is a name, or a list of layers: [{linear: 16}, relu, linear]"

PRIVATE_JOB: Final[dict[str, str]] = {
    **dict.fromkeys(("validation", "validation_split", "val", "val_size", "valid", "dev"), _VALIDATED),
    **dict.fromkeys(("test_size", "test_split", "split", "holdout", "eval"), _HELD_OUT),
    **dict.fromkeys(("target", "label", "label_column", "classes", "features", "columns", "categorical"), _TARGET),
    **dict.fromkeys(("sample_weight", "sample_weights", "weight_column"), _ROWS),
    **dict.fromkeys(("class_weight", "pos_weight"), "job.class_weights: a number for each class"),
    **dict.fromkeys(("early_stopping", "early_stop", "monitor", "stop_after"), _STOP),
    **dict.fromkeys(("save_best", "best", "restore_best_weights"), "job.keep_best: the weights of the least val_loss"),
    **dict.fromkeys(("hidden", "hidden_sizes", "layers", "width", "depth", "activation", "architecture"), _LAYERS),
    **dict.fromkeys(("clusters", "n_clusters", "k"), "job.model: [{kmeans: 3}]"),
    "smoothing": "job.label_smoothing",
    "dropout": "job.model has layers of it: {dropout: 0.1}",
    "loss": "job.objective: cross-entropy, binary, mse, huber, poisson, or inertia of k-means",
    "criterion": "job.objective: cross-entropy, binary, mse, huber, poisson, or inertia of k-means",
    "metrics": "job.reveal lists what is told at the end: accuracy, auc, rmse, ...",
    "metric": "job.reveal lists what is told at the end: accuracy, auc, rmse, ...",
    "learning_rate": "job.lr",
    "lr_schedule": "job.schedule",
    "scheduler": "job.schedule",
    "l2": "job.weight_decay",
    "regularization": "job.weight_decay",
    "grad_clip": "job.clip_norm",
    "max_grad_norm": "job.clip_norm",
    "batch_size": "job.batch",
    "max_steps": "job.steps",
    "precision": "job.frac_bits: bits behind the point of the fixed-point numbers",
    "dtype": "job.frac_bits: bits behind the point of the fixed-point numbers",
    "gpus": "job.device, and the pods of the fleet section",
    "workers": "topology: replicas, stages and tensor ranks",
    "dataset": "job.data",
    "path": "job.data",
    "checkpoint": "job.checkpoint_every",
    "save_every": "job.checkpoint_every",
}
"""What to say of such a key of a private job."""
