"""D9: ranks whose jobs differ fail together, with the name of what differs, before anything is built on it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchmetrics import MeanAbsoluteError, MeanSquaredError

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from d9d.loop.control import CreateMetricsContext, CreateMetricsResult, DataProvider
from d9d.metric.impl.aggregation import SumMetric
from d9d.metric.impl.classification import confusion_matrix_metric
from d9d.metric.impl.container import ComposeMetric
from d9d.metric.impl.torchmetrics import TorchMetricsMetric
from tests.d9d.loop.run.regression_job import BASE_SEED, GLOBAL_BATCH_SIZE, Data, Task, build_job, collate

MESH = DeviceMeshParameters(data_parallel_replicate=2)


class MoreMetrics(Task):
    def create_metrics(self, ctx: CreateMetricsContext) -> CreateMetricsResult:
        metrics = {"samples": SumMetric()}
        if dist.get_rank() == 1:
            metrics["more"] = SumMetric()
        return CreateMetricsResult(metrics=dict(metrics))


class OtherMetrics(Task):
    """The same names on all ranks, but values that do not fit together."""

    def create_metrics(self, ctx: CreateMetricsContext) -> CreateMetricsResult:
        rank = dist.get_rank()
        inner = {"a": SumMetric(), f"of rank {rank}": SumMetric()}
        classes = confusion_matrix_metric().multiclass(3 + rank).with_accuracy().micro()
        kind = TorchMetricsMetric((MeanSquaredError, MeanAbsoluteError)[rank]())
        return CreateMetricsResult(metrics={"inner": ComposeMetric(inner), "classes": classes.build(), "kind": kind})


@pytest.mark.world_size(2)
def test_metrics_of_one_name_must_fit_together(tmp_path: Path):
    with pytest.raises(ValueError, match="do not agree on the parts of the job") as error:
        build_job(MESH, tmp_path, task_class=OtherMetrics)
    text = str(error.value)
    assert '- metrics.inner.of rank 0: ["sum of torch.float64, ()"] on rank 0; nothing on rank 1' in text
    sizes = [f'["sum of torch.int64, (4, {size})"] on rank {rank}' for rank, size in enumerate((3, 4))]
    assert f"- metrics.classes: {'; '.join(sizes)}" in text
    assert '- metrics.kind: "MeanSquaredError" on rank 0; "MeanAbsoluteError" on rank 1' in text
    assert "metrics.inner.a" not in text


def data_of(num_samples: int, seed: int = 0) -> DataProvider:
    config = AutoDataConfig(
        global_batch_size=GLOBAL_BATCH_SIZE, microbatch_size=2, num_workers=0, pin_memory=False, seed=seed
    )
    return AutoDataProvider(lambda context: Data(num_samples, torch.float64), collate, config)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("config", r"trainer\.determinism\.base_seed: 7 on rank 0; 8 on rank 1"),
        ("steps", r"trainer\.schedule\.total_steps: 20 on rank 0; 21 on rank 1"),
        ("length", "480 on rank 0"),
        ("seed", "data.seed: 0 on rank 0; 1 on rank 1"),
        ("metrics", r'metrics\.more: nothing on rank 0; \["sum of torch.float64, \(\)"\] on rank 1'),
    ],
)
def test_what_differs_is_named_on_all_ranks(tmp_path: Path, what: str, named: str):
    rank = dist.get_rank()
    options: dict[str, Any] = {}
    match what:
        case "config":
            options["overrides"] = {"determinism": {"base_seed": BASE_SEED + rank}}
        case "steps":
            options["total_steps"] = 20 + rank
        case "length":
            options["data_provider"] = data_of(GLOBAL_BATCH_SIZE * (30 - rank))
        case "seed":
            options["data_provider"] = data_of(GLOBAL_BATCH_SIZE * 30, seed=rank)
        case _:
            options["task_class"] = MoreMetrics
    with pytest.raises(ValueError, match=named):
        build_job(MESH, tmp_path, **options)
