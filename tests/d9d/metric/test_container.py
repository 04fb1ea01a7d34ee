"""Children by name, and how many collectives they cost."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from d9d.core.dist_context import DeviceMeshParameters
from d9d.metric import Metric
from d9d.metric.impl.aggregation import SumMetric, WeightedMeanMetric
from d9d.metric.impl.classification import BinaryAUROCMetric, confusion_matrix_metric
from d9d.metric.impl.container import ComposeMetric


class Foreign(Metric[int]):
    """A metric that reduces itself."""

    def __init__(self):
        self.num_syncs = 0

    def update(self, *args, **kwargs):
        pass

    def sync(self, dist_context):
        self.num_syncs += 1

    def compute(self):
        return self.num_syncs

    def reset(self):
        self.num_syncs = 0

    def state_dict(self):
        return {"num_syncs": self.num_syncs}

    def load_state_dict(self, state_dict):
        self.num_syncs = state_dict["num_syncs"]


def test_children_are_updated_together_or_one_by_one():
    metric = ComposeMetric({"left": SumMetric(), "right": SumMetric()})
    metric.update(torch.tensor(1.0))
    metric.children["right"].update(torch.tensor(2.0))
    assert {name: value.item() for name, value in metric.compute().items()} == {"left": 1.0, "right": 3.0}
    metric.reset()
    assert {name: value.item() for name, value in metric.compute().items()} == {"left": 0.0, "right": 0.0}


def test_a_new_metric_starts_anew_on_resume():
    saved = ComposeMetric({"kept": SumMetric(), "removed": SumMetric()})
    saved.update(2.0)
    resumed = ComposeMetric({"kept": SumMetric(), "added": SumMetric()})
    resumed.load_state_dict(saved.state_dict())
    assert {name: value.item() for name, value in resumed.compute().items()} == {"kept": 2.0, "added": 0.0}


@pytest.mark.world_size(2)
def test_one_collective_per_dtype_and_operation():
    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    children = {
        "loss": WeightedMeanMetric(),
        "tokens": SumMetric(),
        "accuracy": confusion_matrix_metric().multiclass(3).with_accuracy().build(),
        "f1": confusion_matrix_metric().binary().with_f1().build(),
        "auroc": BinaryAUROCMetric(10),
        "nested": ComposeMetric({"sum": SumMetric(), "foreign": Foreign()}),
        "foreign": Foreign(),
    }
    # Ranks may fill their dicts in different orders.
    order = list(children) if context.rank == 0 else list(reversed(children))
    metric = ComposeMetric({name: children[name] for name in order})
    rank = context.rank
    children["loss"].update(torch.tensor(1.0 + rank), torch.tensor(1.0))
    children["tokens"].update(10.0 + rank)
    children["accuracy"].update(torch.tensor([0, 1]), torch.tensor([0, rank]))
    children["f1"].update(torch.tensor([0.9]), torch.tensor([rank]))
    children["auroc"].update(torch.tensor([0.25 + rank / 2]), torch.tensor([rank]))
    children["nested"].children["sum"].update(rank)
    with CommDebugMode() as comms:
        metric.sync(context)
    assert comms.get_total_counts() == 2
    result = metric.compute()
    assert result["loss"].item() == 1.5
    assert result["tokens"].item() == 21.0
    assert result["accuracy"].item() == 0.75
    assert result["f1"].item() == pytest.approx(2 / 3)
    assert result["auroc"].item() == 1.0
    assert result["nested"]["sum"].item() == 1.0
    assert result["foreign"] == result["nested"]["foreign"] == 1
