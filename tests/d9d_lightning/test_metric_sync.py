"""States of torchmetrics are exchanged at once, and reduced as torchmetrics does."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torchmetrics import Metric, MetricCollection, MetricTracker, SumMetric
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassPrecision
from torchmetrics.regression import ExplainedVariance, PearsonCorrCoef
from torchmetrics.wrappers import BootStrapper, MinMaxMetric

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d_lightning.jobs.launch import join_job
from d9d_lightning.metrics.install import MetricDomains, install_metric_sync, sync_over, synced_together
from d9d_lightning.metrics.packing import gather_trees
from tests.d9d_lightning.support import PoolEnvironment

CPU = torch.device("cpu")


def join(last_pp_rank=None, **degrees):
    """What the strategy does when it starts. The caller keeps the result alive, as the strategy does."""
    params = DeviceMeshParameters(**degrees)
    domains = MetricDomains(join_job(params, PoolEnvironment(), params.world_size, CPU), last_pp_rank=last_pp_rank)
    domains.activate()
    return domains


def installed(**metrics):
    module = nn.ModuleDict(metrics)
    install_metric_sync(module)
    return module


def num_collectives(run):
    with CommDebugMode() as mode:
        run()
    return mode.get_total_counts()


def half_of_largest(stacked):
    return stacked.amax(0) / 2


def first_of(elements):
    return elements[0]


class EveryState(Metric):
    """One state of each kind; updates differ in value."""

    def __init__(self):
        super().__init__()
        for name in ("sum", "mean", "max", "min"):
            self.add_state(name, torch.zeros(2, 3), dist_reduce_fx=name)
        self.add_state("scalar", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("stacked", torch.zeros(2), dist_reduce_fx=None)
        self.add_state("custom", torch.zeros(2), dist_reduce_fx=half_of_largest)
        self.add_state("flags", torch.zeros(3, dtype=torch.bool), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("waves", torch.zeros(2, dtype=torch.complex64), dist_reduce_fx="sum")
        self.add_state("halves", torch.zeros(2, dtype=torch.float16), dist_reduce_fx="max")
        self.add_state("empty", torch.zeros(0, 2), dist_reduce_fx=None)
        self.add_state("joined", [], dist_reduce_fx="cat")
        self.add_state("joined_scalars", [], dist_reduce_fx="cat")
        self.add_state("listed", [], dist_reduce_fx=None)
        self.add_state("first", [], dist_reduce_fx=first_of)
        self.add_state("never", [], dist_reduce_fx=None)

    def update(self, seed):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(2, 3, generator=generator)
        for state in (self.sum, self.mean, self.max, self.min):
            state.copy_(state + values)
        self.scalar = self.scalar + values[0, 0]
        self.stacked = self.stacked + values[0, :2]
        self.custom = self.custom + values[1, :2]
        self.flags = self.flags | (values[0] > 0)
        self.counts = self.counts + (values[0, :2] * 10).long()
        self.waves = self.waves + torch.complex(values[0, :2], values[1, :2]).conj()
        self.halves = values[0, :2].half()
        self.joined.append(values)
        self.joined_scalars.append(values[0, 0])
        self.listed.append(values[0])
        self.first.append(values[1])

    def compute(self):
        return dict(self.metric_state)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("num_updates", [1, 2])
def test_each_kind_of_state_is_reduced_as_torchmetrics_does(num_updates):
    domains = join(data_parallel_replicate=2)
    ours, theirs = EveryState(), EveryState()
    module = installed(ours=ours)
    for update in range(num_updates):
        ours.update(10 * dist.get_rank() + update)
        theirs.update(10 * dist.get_rank() + update)
    expected, own = theirs.compute(), dict(ours.metric_state)
    torch.testing.assert_close(module["ours"].compute(), expected, rtol=0, atol=0)
    # And the states are those of this rank again.
    torch.testing.assert_close(dict(ours.metric_state), own, rtol=0, atol=0)
    assert domains.updates_metrics


class Listed(Metric):
    """A44: a list without a reduction; elements of several dimensions and types."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx=None)

    def update(self, value):
        self.seen.append(value)

    def compute(self):
        return list(self.seen)


@pytest.mark.world_size(2, timeout_s=10)
@pytest.mark.parametrize("num_on_second", [0, 1])
def test_lists_of_different_lengths(num_on_second):
    """torchmetrics 1.9 hangs, as ranks issue different numbers of collectives."""
    domains = join(data_parallel_shard=2)
    metric = installed(listed=Listed())["listed"]
    for index in range(2 if dist.get_rank() == 0 else num_on_second):
        metric.update(torch.full((2, index + 1), 10 * dist.get_rank() + index))
    shapes = [(tuple(element.shape), element.unique().tolist()) for element in metric.compute()]
    of_second = [((2, 1), [10])] if num_on_second else []
    assert shapes == [((2, 1), [0]), *of_second, ((2, 2), [1])]
    assert len(metric.seen) == (2 if dist.get_rank() == 0 else num_on_second)
    del domains


@pytest.mark.world_size(2)
def test_lists_of_anything_plain():
    domains = join(data_parallel_shard=2)
    metric = installed(listed=Listed())["listed"]
    rank = dist.get_rank()
    element = (f"rank {rank}", bytes([rank]), {"mask": torch.tensor([rank == 0]), "size": (rank, 2.5)}, torch.int8)
    metric.update(element)
    first, second = metric.compute()
    assert first == ("rank 0", b"\x00", {"mask": torch.tensor([True]), "size": (0, 2.5)}, torch.int8)
    assert second == ("rank 1", b"\x01", {"mask": torch.tensor([False]), "size": (1, 2.5)}, torch.int8)
    del domains


@pytest.mark.world_size(2)
@pytest.mark.parametrize("idle_rank", [0, 1])
def test_an_idle_rank_knows_no_shapes(idle_rank):
    """The states of ExplainedVariance are scalars until the first update."""
    domains = join(data_parallel_shard=2)
    metric = installed(variance=ExplainedVariance())["variance"]
    generator = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(2, 10, 3, generator=generator).unbind(0)
    if dist.get_rank() != idle_rank:
        metric.update(scores, targets)
    alone = ExplainedVariance(sync_on_compute=False)
    alone.update(scores, targets)
    torch.testing.assert_close(metric.compute(), alone.compute())
    del domains


class Learns(Metric):
    """Finds out in `update` what it needs in `compute`, as MeanIoU and FrechetInceptionDistance do."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value):
        self.seen_dtype = value.dtype
        self.scale = 3
        self.total = self.total + value.sum()

    def compute(self):
        return (self.total * self.scale).to(self.seen_dtype)


@pytest.mark.world_size(2)
def test_an_idle_rank_takes_over_what_others_have_learnt():
    domains = join(data_parallel_shard=2)
    metric = installed(learns=Learns())["learns"]
    if dist.get_rank() == 1:
        metric.update(torch.tensor([2.0], dtype=torch.float64))
    value = metric.compute()
    assert (value.item(), value.dtype) == (6, torch.float64)
    del domains


@pytest.mark.world_size(2)
def test_every_rank_takes_part_however_it_was_updated():
    """A value cached on the rank without new samples would keep it out of the second exchange."""
    domains = join(data_parallel_shard=2)
    metric = installed(count=SumMetric())["count"]
    metric.update(1)
    assert metric.compute() == 2
    if dist.get_rank() == 0:
        metric.update(5)
    assert metric.compute() == 7
    assert metric.compute() == 7
    metric.reset()
    metric.update(2)
    assert metric.compute() == 4
    del domains


@pytest.mark.world_size(2)
def test_two_collectives_for_a_metric_and_for_a_collection():
    domains = join(data_parallel_shard=2)
    scores = torch.eye(3)[torch.tensor([0, 1, 2, 2])]
    labels = torch.tensor([0, 1, 1, 2])
    metrics = {
        "accuracy": MulticlassAccuracy(3),
        "precision": MulticlassPrecision(3),
        "matrix": MulticlassConfusionMatrix(3),
    }
    module = installed(collection=MetricCollection(metrics, prefix="val/"), every=EveryState())
    for metric in module.values():
        metric.update(*((scores, labels) if isinstance(metric, MetricCollection) else (0,)))
    assert len(module["collection"].compute_groups) < len(metrics)
    assert num_collectives(module["every"].compute) == 2
    values = {}
    assert num_collectives(lambda: values.update(module["collection"].compute())) == 2
    assert values["val/accuracy"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    assert values["val/matrix"].tolist() == [[2, 0, 0], [0, 2, 2], [0, 0, 2]]
    # Once more than it was packed: by itself.
    collection = module["collection"]
    with synced_together(collection.values(copy_state=False)):
        first = collection["accuracy"].compute()
        collection["accuracy"].update(scores[:1], torch.tensor([2]))
        second = collection["accuracy"].compute()
    assert [first, second] == pytest.approx([(1 + 1 / 2 + 1) / 3, (1 + 1 / 2 + 1 / 2) / 3])
    del domains


@pytest.mark.world_size(2)
def test_a_collection_with_several_domains_and_a_metric_of_its_own_way():
    domains = join(data_parallel_shard=2)
    collection = MetricCollection(
        {"ours": SumMetric(), "local": SumMetric(), "own": SumMetric(dist_sync_fn=doubled), "all": SumMetric()}
    )
    sync_over(collection["local"], None)
    sync_over(collection["all"], "world")
    installed(collection=collection)
    for metric in collection.values():
        metric.update(dist.get_rank() + 1)
    values = {name: value.item() for name, value in collection.compute().items()}
    assert values == {"ours": 3, "local": dist.get_rank() + 1, "own": 2 * (dist.get_rank() + 1), "all": 3}
    del domains


def doubled(state, group=None):
    return [state, state]


class OwnExchange(SumMetric):
    """Exchanges in its own way, over the group that it is told."""

    def _sync_dist(self, dist_sync_fn=None, process_group=None):
        self.group_size = dist.get_world_size(process_group)
        dist.all_reduce(self.sum_value, group=process_group)


@pytest.mark.world_size(2)
def test_metrics_that_gather_in_their_own_way_do_so():
    domains = join(tensor_parallel=2)
    module = installed(
        group=SumMetric(process_group=dist.group.WORLD),
        function=SumMetric(dist_sync_fn=doubled),
        override=OwnExchange(),
        later=SumMetric(),
    )
    module["later"].process_group = dist.group.WORLD
    for metric in module.values():
        metric.update(1)
    assert module["group"].compute() == module["function"].compute() == module["later"].compute() == 2
    # Nobody else holds different data.
    assert module["override"].compute() == 1
    del domains


@pytest.mark.world_size(2)
@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("kind", ["sparse", "distributed", "object"])
def test_what_one_rank_cannot_send_is_an_error_on_all(failing_rank, kind):
    domains = join(data_parallel_shard=2)
    metric = installed(seen=Listed())["seen"]
    metric.update(torch.ones(1))
    if dist.get_rank() == failing_rank:
        mesh = domains.context.mesh_for(DENSE_DOMAIN)["dp_replicate"]
        metric.update(
            {
                "sparse": torch.eye(2).to_sparse(),
                "distributed": DTensor.from_local(torch.ones(1), mesh, [Replicate()]),
                "object": object(),
            }[kind]
        )
    with pytest.raises(RuntimeError, match=rf"rank {failing_rank}: state 'seen' of 'seen' \(Listed\): TypeError"):
        metric.compute()
    # And nobody waits for a collective that others have left out.
    assert installed(count=SumMetric())["count"].compute() == 0


@pytest.mark.world_size(2)
def test_states_that_do_not_fit_together_are_an_error_on_all():
    domains = join(data_parallel_shard=2)
    metric = installed(matrix=EveryState())["matrix"]
    metric.update(0)
    metric.stacked = torch.zeros(3 + dist.get_rank())
    with pytest.raises(RuntimeError, match=r"state 'stacked' of 'matrix' \(EveryState\)"):
        metric.compute()
    del domains


@pytest.mark.world_size(2)
def test_ranks_that_compute_different_metrics_are_told():
    domains = join(data_parallel_shard=2)
    module = installed(a=SumMetric(), b=SumMetric())
    with pytest.raises(RuntimeError, match=r"different metrics at the same time: \[\[\"'a'.*\"'b'"):
        module["a" if dist.get_rank() == 0 else "b"].compute()
    del domains


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_copies_sync_by_themselves():
    domains = join(tensor_parallel=2)
    collection = MetricCollection([SumMetric(), CatMetric()])
    sync_over(collection["CatMetric"], "world")
    installed(collection=collection)
    collection.update(1.0)
    for copied in (copy.deepcopy(collection), collection.clone(), pickle.loads(pickle.dumps(collection))):  # noqa: S301
        copied.update(2.0)
        values = copied.compute()
        assert values["SumMetric"] == 3
        assert values["CatMetric"].tolist() == [1, 2, 1, 2]
    collection.reset()
    assert len(copied["CatMetric"].value) == 2
    with pytest.raises(RuntimeError, match=r"'collection\.SumMetric' \(SumMetric\).*clone"):
        # torchmetrics keeps bound methods, so that even then `compute` would be that of the original.
        copy.copy(collection["SumMetric"]).sync()
    del domains


@pytest.mark.world_size(2)
def test_forward_with_sync_on_step():
    domains = join(data_parallel_shard=2)
    metric = installed(count=SumMetric(dist_sync_on_step=True))["count"]
    assert [metric(dist.get_rank() + 1).item() for _ in range(2)] == [3, 3]
    assert metric.compute() == 6
    del domains


@pytest.mark.world_size(2)
def test_gradients_reach_the_states_of_this_rank():
    domains = join(data_parallel_shard=2)
    metric = installed(seen=CatMetric())["seen"]
    values = torch.ones(2, requires_grad=True)
    metric.value = [values * 2, values * 3]
    metric.sync()
    assert metric.value.shape == (8,)
    (metric.value.sum()).backward()
    assert values.grad.tolist() == [5, 5]
    metric.unsync()
    del domains


def count_32(metric_rank, num_metric_ranks):
    """32 samples in 4 batches, of which a rank takes its part."""
    labels = torch.arange(32) % 4
    return labels.chunk(4)[metric_rank::num_metric_ranks]


@pytest.mark.world_size(4)
def test_32_samples_count_32_beside_tensor_parallel_peers():
    domains = join(tensor_parallel=2, data_parallel_shard=2)
    module = installed(count=SumMetric(), matrix=MulticlassConfusionMatrix(4), seen=CatMetric(), world=SumMetric())
    sync_over(module["world"], "world")
    for batch in count_32(domains.context.dp_rank, 2):
        module["count"].update(len(batch))
        module["world"].update(len(batch))
        module["matrix"].update(batch, batch)
        module["seen"].update(batch.float())
    assert module["count"].compute() == 32
    assert module["matrix"].compute().tolist() == torch.diag(torch.tensor([8] * 4)).tolist()
    assert module["seen"].compute().tolist() == [0.0, 1.0, 2.0, 3.0] * 8
    assert module["world"].compute() == 64


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("domain", "expected"), [("data", 4), ("data_parallel", 2), ("world", 4), (None, 1)])
def test_domains_beside_context_parallel_peers(domain, expected):
    domains = join(context_parallel_shard=2, data_parallel_shard=2)
    metric = installed(tokens=BootStrapper(SumMetric(), num_bootstraps=2))["tokens"]
    sync_over(metric, domain)
    for child in metric.metrics:
        child.update(1)
    assert metric.compute()["mean"] == expected
    del domains


def pipelined_module():
    accuracy = MulticlassAccuracy(4, average="micro")
    return installed(
        count=SumMetric(),
        matrix=MulticlassConfusionMatrix(4),
        seen=CatMetric(),
        correlation=PearsonCorrCoef(),
        tracker=MetricTracker(SumMetric(), maximize=True),
        boot=BootStrapper(SumMetric(), num_bootstraps=3, sampling_strategy="multinomial"),
        extremes=MinMaxMetric(SumMetric()),
        twofold=SumMetric() + SumMetric(),
        collection=MetricCollection([accuracy, MulticlassPrecision(4, average="micro"), MulticlassConfusionMatrix(4)]),
        own=OwnExchange(),
        learns=Learns(),
        listed=Listed(),
    )


def update_all(module, batch):
    ones = torch.ones(len(batch))
    for name, metric in module.items():
        match name:
            case "matrix" | "collection":
                metric.update(batch, batch)
            case "correlation":
                metric.update(batch.float(), 2 * batch.float())
            case "seen" | "listed" | "learns":
                metric.update(batch.float())
            case _:
                metric.update(ones)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("last_pp_rank", [0, 1])
def test_all_ranks_of_a_pipeline_compute_what_the_last_stage_has_seen(last_pp_rank):
    domains = join(last_pp_rank, pipeline_parallel=2, data_parallel_shard=2)
    module = pipelined_module()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            module["tracker"].increment()
            if domains.updates_metrics:
                for batch in count_32(domains.context.dp_rank, 2):
                    with domains.inside_step():
                        update_all(module, batch)
            values = {name: metric.compute() for name, metric in module.items()}
            check_32(values)
            assert values["tracker"] == 32
            assert values["own"] == 32
            assert values["extremes"] == {"raw": 32, "max": 32, "min": 32}
            again = module["collection"].clone(prefix="again/").compute()
            assert again["again/MulticlassAccuracy"] == 1
            for name, metric in module.items():
                if name != "tracker":
                    metric.reset()
            install_metric_sync(module)  # as strategies do when an epoch starts
        assert module["tracker"].compute_all().tolist() == [32, 32]


def check_32(values):
    full = torch.diag(torch.tensor([8] * 4)).tolist()
    assert values["count"] == 32
    assert values["matrix"].tolist() == full
    assert values["seen"].tolist() == [0.0, 1.0, 2.0, 3.0] * 8
    assert values["correlation"].item() == pytest.approx(1)
    assert values["boot"] == {"mean": 32, "std": 0}
    assert values["twofold"] == 64
    assert values["collection"]["MulticlassPrecision"] == 1
    assert values["collection"]["MulticlassConfusionMatrix"].tolist() == full
    assert values["learns"] == 3 * 48
    assert [len(element) for element in values["listed"]] == [8] * 4


@pytest.mark.world_size(4)
def test_a_pipeline_needs_four_collectives_for_a_collection():
    domains = join(1, pipeline_parallel=2, data_parallel_shard=2)
    module = pipelined_module()
    if domains.updates_metrics:
        module["collection"].update(torch.arange(4), torch.arange(4))
        module["seen"].update(torch.ones(4))
    expected = 4 if domains.updates_metrics else 2
    assert num_collectives(module["collection"].compute) == expected
    assert num_collectives(module["seen"].compute) == expected
    # Without data-parallel peers there is nothing to gather.
    sync_over(module["count"], None)
    assert num_collectives(module["count"].compute) == 2


@pytest.mark.world_size(4)
def test_inside_a_step_only_the_last_stage_is_there():
    domains = join(1, pipeline_parallel=2, data_parallel_shard=2)
    module = installed(count=SumMetric(), step=SumMetric(dist_sync_on_step=True), world=SumMetric())
    sync_over(module["world"], "world")
    if domains.updates_metrics:
        with domains.inside_step():
            module["count"].update(1)
            module["world"].update(1)
            assert module["count"].compute() == 2
            assert module["step"](3) == 6
            with pytest.raises(NotImplementedError, match="end of the epoch"):
                module["world"].compute()
        module["count"].update(1)
    # The value of the step is no longer the right one.
    assert module["count"].compute() == 4
    assert module["step"].compute() == 6
    assert module["world"].compute() == 2


@pytest.mark.world_size(4)
def test_errors_of_the_last_stage_are_those_of_its_pipeline():
    domains = join(1, pipeline_parallel=2, data_parallel_shard=2)
    module = installed(seen=Listed(), own=OwnExchange())
    if domains.updates_metrics and domains.context.dp_rank == 1:
        module["seen"].update(object())
    with pytest.raises(RuntimeError, match=r"rank 3: state 'seen' of 'seen' \(Listed\): TypeError: a object"):
        module["seen"].compute()
    sync_over(module["own"], "world")
    with pytest.raises(NotImplementedError, match="in its own way"):
        module["own"].compute()
    module["own"].reset()


@pytest.mark.world_size(2)
def test_a_pipeline_must_say_who_updates():
    domains = join(1, pipeline_parallel=2)
    module = installed(count=SumMetric())
    context = domains.context
    del domains
    gc.collect()
    with pytest.raises(RuntimeError, match="last_pp_rank"):
        module["count"].compute()
    with pytest.raises(ValueError, match=r"last_pp_rank \(2\)"):
        MetricDomains(context, last_pp_rank=2)


def test_sync_over_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"'everywhere' is unknown\. Valid: 'data', 'data_parallel', 'world', None"):
        sync_over(SumMetric(), "everywhere")
    with pytest.raises(ValueError, match="no torchmetrics"):
        sync_over(nn.Linear(1, 1), "data")
    with pytest.raises(ValueError, match="SumMetric has a process_group or dist_sync_fn"):
        sync_over(MetricCollection([MaxMetric(), SumMetric(dist_sync_fn=doubled)]), "data")


def test_without_a_mesh_metrics_are_as_ever():
    module = installed(count=SumMetric(), mean=MeanMetric(), all=MetricCollection([MaxMetric()]))
    sync_over(module["mean"], "world")
    for metric in module.values():
        metric.update(2.0)
    assert [module["count"].compute(), module["mean"].compute()] == [2, 2]
    assert module["all"].compute() == {"MaxMetric": 2}


@pytest.mark.world_size(2)
def test_trees_arrive_as_they_were_sent():
    rank = dist.get_rank()
    shared = torch.arange(3, dtype=torch.int16)
    tree = {
        "twice": [shared, shared],
        "none": None,
        "numbers": (1, 2.5, float("inf"), True, "ü", b""),
        "strided": torch.arange(6.0).view(2, 3).t(),
        "empty": torch.zeros(0, 3, dtype=torch.bfloat16),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "by_rank": torch.full((rank,), rank, dtype=torch.uint8),
    }
    gathered = gather_trees(lambda: tree, dist.group.WORLD, CPU)
    assert [sender for sender, _ in gathered] == [0, 1]
    for sender, received in gathered:
        expected = {**tree, "by_rank": torch.full((sender,), sender, dtype=torch.uint8)}
        assert received["numbers"] == expected["numbers"]
        assert received["none"] is None
        assert list(received) == list(expected)
        for name in ("twice", "strided", "empty", "conjugate", "by_rank"):
            torch.testing.assert_close(received[name], expected[name], rtol=0, atol=0)
    only_first = gather_trees((lambda: "first") if rank == 0 else None, dist.group.WORLD, CPU)
    assert only_first == [(0, "first")]
