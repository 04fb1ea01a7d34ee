"""Experts over ranks: outputs and gradients of the single process, whatever ranks and experts have no tokens."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from d9d.core.dist_context import DENSE_DOMAIN, EXPERT_DOMAIN, DeviceMeshParameters
from d9d.core.placement import local_tensor
from d9d.internals.grad_norm import clip_local_gradients_
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.internals.materialize import materialize_module
from d9d.module.block.moe import MoELayer, SharedExpertParameters
from d9d.module.block.moe.communications import ExpertCommunicationHandler
from d9d.module.block.moe.grouped_mm import ExpertTokenGroups, TorchGroupedMmBackendConfig
from d9d.module.parallelism.api import (
    SequenceSharding,
    parallelize_expert_parallel,
    parallelize_hsdp,
    parallelize_replicate,
)
from d9d.module.parallelism.style import ShardMoESparseExpertsParallel
from tests.d9d.module.block.oracles import FP32_SUMS, FP64, randomize
from tests.harness.parity import assert_close_tree, named_full_gradients, named_full_parameters

HIDDEN, WIDTH, EXPERTS, TOP_K = 5, 3, 8, 2
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # sums of some dozens of terms in another order; a wrong factor would be 2
BF16 = {"rtol": 0.05, "atol": 0.05}  # some roundings of 2**-8, and sums of two ranks in another order
AVOIDED = {"expert without tokens": [3], "experts of a rank without tokens": [4, 5, 6, 7]}
KINDS = ("plain", "ties", "expert without tokens", "rank without tokens", "experts of a rank without tokens")


def build(kind: str = "plain", num_experts: int = EXPERTS, shared: SharedExpertParameters | None = None) -> MoELayer:
    layer = MoELayer(HIDDEN, WIDTH, num_experts, TOP_K, True, shared).double()
    randomize(layer)
    avoided = AVOIDED.get(kind, [])
    with torch.no_grad():
        layer.router.gate.weight[:, 0] = 0.0
        layer.router.gate.weight[avoided, 0] = -100.0
    return layer


def tokens_of(data_rank: int, kind: str) -> torch.Tensor:
    """Tokens of one rank with data of its own; each has another number of them."""
    num_tokens = 0 if kind == "rank without tokens" and data_rank == 1 else 9 + 5 * data_rank
    generator = torch.Generator().manual_seed(data_rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64)
    x[:, 0] = 10.0  # by which a router can keep all tokens from an expert
    if kind == "ties":
        x[::2] = 0.0  # all experts have the same score for half of the tokens
    return x.requires_grad_()


def synchronized(module: nn.Module, plain_groups: tuple[dist.ProcessGroup, ...] = ()) -> GradientSynchronizer:
    synchronizer = GradientSynchronizer([list(module.parameters())], 1, plain_groups=plain_groups)
    synchronizer.bind()
    synchronizer.set_required_accumulations(1)
    return synchronizer


def step(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = layer(x)
    output.sin().sum().backward()
    return output.detach()


def reference(layer: nn.Module, num_data_ranks: int, kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output and gradient of the tokens of each rank; gradients of parameters are their sums."""
    batches = [tokens_of(rank, kind) for rank in range(num_data_ranks)]
    return [(step(layer, x), x.grad) for x in batches]


def assert_equals_one_process(params: DeviceMeshParameters, kind: str, *, with_data_groups: bool = False) -> None:
    context = params.build()
    mesh = context.mesh_for(EXPERT_DOMAIN)
    layer, single = build(kind), build(kind)
    parallelize_expert_parallel(layer, mesh["ep_replicate", "ep_shard", "tp"])
    dense = context.mesh_for(DENSE_DOMAIN)
    data_groups = tuple(dense.get_group(name) for name in ("dp_cp_shard", "dp_replicate") if dense[name].size() > 1)
    synchronizer = synchronized(layer, data_groups if with_data_groups else ())
    x = tokens_of(context.dp_rank, kind)
    output = step(layer, x)
    synchronizer.wait()
    expected = reference(single, params.data_ranks, kind)
    torch.testing.assert_close(output, expected[context.dp_rank][0], **EXACT)
    torch.testing.assert_close(x.grad, expected[context.dp_rank][1], **EXACT)
    gradients = named_full_gradients(single)
    assert_close_tree(named_full_gradients(layer), gradients, **EXACT)
    norm = clip_local_gradients_(synchronizer.local_gradients(), None, 2.0, None)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in gradients.values()]).norm(), **EXACT)
    assert single.tokens_per_expert.eq(0).nonzero().flatten().tolist() == AVOIDED.get(kind, [])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_two_ranks_equal_one_process(kind: str, expert_parallel: int):
    """With one rank per copy of the experts too, no factor creeps in."""
    params = DeviceMeshParameters(data_parallel_replicate=2, expert_parallel=expert_parallel)
    assert_equals_one_process(params, kind)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expert_parallel", [2, 4])
@pytest.mark.parametrize("with_data_groups", [False, True])
def test_four_ranks_equal_one_process(kind: str, expert_parallel: int, with_data_groups: bool):
    """The groups of the dense domain may be given for other parameters; experts go by their own mesh."""
    params = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2, expert_parallel=expert_parallel)
    assert_equals_one_process(params, kind, with_data_groups=with_data_groups)


@pytest.mark.world_size(4)
def test_tensor_parallel_peers_are_not_summed():
    params = DeviceMeshParameters(data_parallel_replicate=2, tensor_parallel=2, expert_parallel=2)
    assert_equals_one_process(params, "plain")


class GatheringHandler(ExpertCommunicationHandler):
    """Another way than all-to-all: all ranks see all tokens, and add up what their experts make of them."""

    def __init__(self, num_experts: int, mesh: DeviceMesh) -> None:
        self._cut = SequenceSharding.over(mesh, "contiguous")
        self._num_own = num_experts // mesh.size()

    def dispatch(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, ExpertTokenGroups]:
        states, ids, weights = (self._cut.gather(part, 0) for part in (hidden_states, topk_ids, topk_weights))
        ids = ids - self._cut.rank * self._num_own
        is_own = (ids >= 0) & (ids < self._num_own)
        token, choice = is_own.nonzero(as_tuple=True)
        order = ids[is_own].argsort(stable=True)
        self._num_tokens, self._token = len(states), token[order]
        groups = ExpertTokenGroups(ids[is_own].bincount(minlength=self._num_own))
        return states[self._token], weights[self._token, choice[order]], groups

    def combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        own = hidden_states.new_zeros(self._num_tokens, HIDDEN).index_add(0, self._token, hidden_states)
        return self._cut.shard(self._cut.gather(own, 0).unflatten(0, (-1, self._num_tokens)).sum(0), 0)


@pytest.mark.world_size(2)
def test_another_way_to_bring_tokens_to_experts():
    mesh = DeviceMeshParameters(data_parallel_replicate=2, expert_parallel=2).build().mesh_for(EXPERT_DOMAIN)
    layer, single = build(), build()
    parallelize_expert_parallel(layer, mesh)
    layer.use_communicator(GatheringHandler(EXPERTS, mesh["ep_shard"]))
    synchronizer = synchronized(layer)
    batches = tokens_of(1, "plain").detach().chunk(2)  # 7 tokens each
    own = batches[dist.get_rank()].clone().requires_grad_()
    output = step(layer, own)
    synchronizer.wait()
    expected = [(step(single, whole), whole.grad) for whole in (batch.clone().requires_grad_() for batch in batches)]
    torch.testing.assert_close((output, own.grad), expected[dist.get_rank()], **EXACT)
    assert_close_tree(named_full_gradients(layer), named_full_gradients(single), **EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("avoided", [[], [4, 5, 6, 7]])
def test_the_grouped_kernel(dtype: torch.dtype, avoided: list[int]):
    """The second rank may get no slot at all."""
    mesh = DeviceMeshParameters(data_parallel_replicate=2, expert_parallel=2).build().mesh_for(EXPERT_DOMAIN)
    split, single = (
        MoELayer(8, 8, EXPERTS, TOP_K, True, grouped_mm_backend=TorchGroupedMmBackendConfig()) for _ in range(2)
    )
    for layer in (split, single):
        randomize(layer)
        with torch.no_grad():
            layer.router.gate.weight[:, 0] = 0.0
            layer.router.gate.weight[avoided, 0] = -100.0
        layer.to(dtype)
    parallelize_expert_parallel(split, mesh)
    synchronizer = synchronized(split)
    batches = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(5)).to(dtype)
    batches[:, :, 0] = 10.0
    output = step(split, batches[dist.get_rank()])
    synchronizer.wait()
    expected = [step(single, batch) for batch in batches][dist.get_rank()]
    tolerance = FP32_SUMS if dtype == torch.float32 else BF16
    torch.testing.assert_close(output, expected, **tolerance)
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **tolerance)
    assert single.tokens_per_expert.eq(0).nonzero().flatten().tolist() == avoided


@pytest.mark.world_size(2)
def test_layouts():
    mesh = DeviceMeshParameters(data_parallel_replicate=2, expert_parallel=2).build().mesh_for(EXPERT_DOMAIN)
    layer, single = build(), build()
    layer.grouped_experts.up_proj.weight.requires_grad_(False)
    parallelize_expert_parallel(layer, mesh)
    experts = dict(layer.named_parameters())
    weight = experts["grouped_experts.down_proj.weight"]
    assert weight.placements == tuple(Shard(0) if name == "ep_shard" else Replicate() for name in mesh.mesh_dim_names)
    rank = dist.get_rank()
    own = single.grouped_experts.down_proj.weight.detach()[4 * rank : 4 * rank + 4]
    torch.testing.assert_close(local_tensor(weight.detach()), own, rtol=0, atol=0)
    assert layer.grouped_experts.down_proj.weight.data_ptr() == local_tensor(weight).data_ptr()
    assert experts["router.gate.weight"].placements == (Replicate(),) * mesh.ndim
    assert not experts["grouped_experts.up_proj.weight"].requires_grad
    assert_close_tree(named_full_parameters(layer), named_full_parameters(single), atol=0, rtol=0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_chooses_the_same_experts(use_reentrant: bool):
    """All experts tie for half of the tokens; the exchange is made once more in the backward pass."""
    mesh = DeviceMeshParameters(data_parallel_replicate=2, expert_parallel=2).build().mesh_for(EXPERT_DOMAIN)
    layer, single = build(), build()
    parallelize_expert_parallel(layer, mesh)
    synchronizer = synchronized(layer)
    x = tokens_of(dist.get_rank(), "ties")
    checkpoint(layer, x, use_reentrant=use_reentrant).sin().sum().backward()
    synchronizer.wait()
    expected = reference(single, 2, "ties")
    torch.testing.assert_close(x.grad, expected[dist.get_rank()][1], **FP64)
    assert_close_tree(named_full_gradients(layer), named_full_gradients(single), **FP64)
    assert layer.tokens_per_expert.sum() == len(x) * TOP_K


@pytest.mark.world_size(2)
def test_a_frozen_router_and_a_copy():
    mesh = DeviceMeshParameters(data_parallel_replicate=2, expert_parallel=2).build().mesh_for(EXPERT_DOMAIN)
    layer, single = build(), build()
    for module in (layer, single):
        module.router.requires_grad_(False)
    parallelize_expert_parallel(layer, mesh)
    twin = copy.deepcopy(layer)
    synchronized(twin)
    inputs = [tokens_of(rank, "plain").detach() for rank in range(2)]
    step(twin, inputs[dist.get_rank()])
    for x in inputs:
        step(single, x)
    assert_close_tree(named_full_gradients(twin), named_full_gradients(single), **FP64)
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.world_size(4)
def test_a_model_with_sharded_and_replicated_parts():
    """Experts stay out of the FSDP unit around them; the shared expert is a part of it."""
    params = DeviceMeshParameters(data_parallel_shard=4, expert_parallel=2)
    context = params.build()
    shared = SharedExpertParameters(intermediate_size=4, enable_gate=True)

    def build_model() -> nn.Module:
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN).double(), build(shared=shared), nn.RMSNorm(HIDDEN).double())
        randomize(model)
        return model

    model, single = build_model(), build_model()
    parallelize_expert_parallel(model[1], context.mesh_for(EXPERT_DOMAIN)["ep_replicate", "ep_shard"])
    dense = context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard", "cp_replicate"]
    parallelize_replicate(model[2], dense)
    parallelize_hsdp(model, dense)
    synchronizer = synchronized(model)
    x = tokens_of(context.dp_rank, "plain")
    output = step(model, x)
    synchronizer.wait()
    expected = reference(single, 4, "plain")
    torch.testing.assert_close(output, expected[context.dp_rank][0], **FP64)
    torch.testing.assert_close(x.grad, expected[context.dp_rank][1], **FP64)
    assert_close_tree(named_full_gradients(model), named_full_gradients(single), **FP64)


@pytest.mark.world_size(2)
def test_initial_values_do_not_depend_on_the_mesh():
    mesh = DeviceMeshParameters(data_parallel_replicate=2, expert_parallel=2).build().mesh_for(EXPERT_DOMAIN)
    with torch.device("meta"):
        layer, single = (MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K, True) for _ in range(2))
    parallelize_expert_parallel(layer, mesh)
    for module in (layer, single):
        materialize_module(module, torch.device("cpu"), 7)
    assert_close_tree(named_full_parameters(layer), named_full_parameters(single), atol=0, rtol=0)
    layer(torch.ones(2, HIDDEN)).sum().backward()
    assert layer.grouped_experts.up_proj.weight.shape == (EXPERTS // 2, HIDDEN, WIDTH)


@pytest.mark.world_size(4)
def test_what_can_not_be_distributed():
    mesh = DeviceMeshParameters(data_parallel_replicate=4, expert_parallel=4).build().mesh_for(EXPERT_DOMAIN)
    layer = build(num_experts=6)
    with pytest.raises(ValueError, match=r"6 experts .* by 4 ranks. Set expert_parallel to one of 1, 2, 3, 6."):
        parallelize_expert_parallel(layer, mesh)
    with pytest.raises(ValueError, match="not 'experts'"):
        parallelize_expert_parallel(layer, mesh, "experts")
    with pytest.raises(NotImplementedError, match="not of a Linear"):
        parallelize_module(nn.Linear(1, 1), mesh["ep_shard"], ShardMoESparseExpertsParallel("ep_shard"))
    assert not any(hasattr(parameter, "placements") for parameter in layer.parameters())


@pytest.mark.world_size(2)
def test_the_style_of_torch():
    mesh = DeviceMeshParameters(data_parallel_replicate=2, expert_parallel=2).build().mesh_for(EXPERT_DOMAIN)
    model, single = nn.ModuleDict({"moe": build()}), build()
    parallelize_module(model, mesh["ep_shard"], {"moe": ShardMoESparseExpertsParallel("ep_shard")})
    x = tokens_of(dist.get_rank(), "plain")
    torch.testing.assert_close(model["moe"](x), single(x), **FP64)
