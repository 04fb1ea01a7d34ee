"""Ids that users filter by."""

import pytest

from d9d.loop.event import Event
from d9d.loop.event.catalogue import inference, train

TRAIN = {
    "CONFIG_STARTED": "train.configuration.start",
    "DATA_STREAM_READY": "train.configuration.data_stream",
    "MODEL_STAGES_READY": "train.configuration.model_stages",
    "OPTIMIZER_READY": "train.configuration.optimizer",
    "LR_SCHEDULER_READY": "train.configuration.lr_scheduler",
    "RESUMED": "train.resumed",
    "READY": "train.ready",
    "STEP_PRE": "train.step.pre",
    "STEP_POST": "train.step.post",
    "FORWARD_BACKWARD_PRE": "train.forward_backward.pre",
    "FORWARD_BACKWARD_POST": "train.forward_backward.post",
    "OPTIMIZER_STEP_PRE": "train.optimizer_step.pre",
    "OPTIMIZER_STEP_POST": "train.optimizer_step.post",
    "FINISHED": "train.finished",
    "NONFINITE": "train.nonfinite",
    "LOSS_SPIKE": "train.loss_spike",
    "PREEMPTED": "train.preempted",
    "SLEEP_PRE": "train.sleep.pre",
    "SLEEP_POST": "train.sleep.post",
    "WAKE_PRE": "train.wake.pre",
    "WAKE_POST": "train.wake.post",
}
INFERENCE = {
    "CONFIG_STARTED": "inference.configuration.start",
    "DATA_STREAM_READY": "inference.configuration.data_stream",
    "MODEL_STAGES_READY": "inference.configuration.model_stages",
    "READY": "inference.ready",
    "STEP_PRE": "inference.step.pre",
    "STEP_POST": "inference.step.post",
    "FORWARD_PRE": "inference.forward.pre",
    "FORWARD_POST": "inference.forward.post",
    "FINISHED": "inference.finished",
}


@pytest.mark.parametrize(
    ("module", "prefix", "ids"), [(train, "EVENT_TRAIN_", TRAIN), (inference, "EVENT_INFERENCE_", INFERENCE)]
)
def test_ids(module, prefix, ids):
    found = {name.removeprefix(prefix): value.id for name, value in vars(module).items() if isinstance(value, Event)}
    assert found == ids
