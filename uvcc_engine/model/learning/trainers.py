"""What trains a model on one worker per party: by gradients, tree by tree, or by moving centroids."""

from __future__ import annotations

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.layer_types.trees import trees_of
from uvcc_engine.model.learning.boosting import TreeTrainer
from uvcc_engine.model.learning.lloyd_steps import KMeansTrainer
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.sealing.inputs import PartyInputs


def trainer_of(rt: Runtime, job: PrivateJob, model: ModelSpec, inputs: PartyInputs) -> PrivateTrainer:
    """The trainer of a model. Raises ConfigError if shapes do not fit."""
    if trees_of(model) is not None:
        return TreeTrainer(rt, job, model, inputs)
    return (KMeansTrainer if model.unsupervised else PrivateTrainer)(rt, job, model, inputs)
