"""Router losses by hand and against transformers; one gradient, however ranks and microbatches share the tokens."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from d9d.core.dist_context import BATCH_DOMAIN, DENSE_DOMAIN, EXPERT_DOMAIN, DeviceMeshParameters
from d9d.core.side_loss import LOSS_SCALE, announce_loss
from d9d.loop.component.gradient_manager import GradientManager
from d9d.loop.component.tracked_modules import TrackedModules, everything
from d9d.loop.config import GradientManagerConfig
from d9d.module.block.moe import MoELayer, RouterLossParameters
from d9d.module.block.moe.router_loss import load_balancing_loss, router_z_loss
from d9d.module.parallelism.api import (
    SequenceSharding,
    parallelize_context,
    parallelize_expert_parallel,
    parallelize_replicate,
)
from tests.d9d.module.block.oracles import FP64, EverythingInDouble, randomize
from tests.harness.parity import assert_close_tree, named_full_gradients

HIDDEN, EXPERTS, TOP_K = 5, 4, 2
COEFFICIENT = 0.1
SEQUENCES, TOKENS = 8, 2  # 16 tokens


def test_load_balancing_loss_by_hand():
    even = torch.full((1, 4, 4), 0.25, dtype=torch.float64)
    torch.testing.assert_close(load_balancing_loss(even, torch.tensor([[2, 2, 2, 2]])), torch.ones(1).double())
    one = torch.tensor([[[1.0, 0, 0, 0]] * 3], dtype=torch.float64)
    torch.testing.assert_close(load_balancing_loss(one, torch.tensor([[3, 0, 0, 0]])), torch.full((1,), 4.0).double())
    # Shares of 3 / 4 and 1 / 4 meet mean probabilities of 0.4 and 0.2.
    mixed = torch.tensor([[[0.6, 0.2, 0.1, 0.1], [0.2, 0.2, 0.3, 0.3]]], dtype=torch.float64)
    torch.testing.assert_close(
        load_balancing_loss(mixed, torch.tensor([[3, 1, 0, 0]])), torch.full((1,), 1.4, dtype=torch.float64), **FP64
    )


def test_equals_transformers():
    qwen3_moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    logits = torch.randn(20, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    probabilities = logits.softmax(-1)
    counts = probabilities.topk(TOP_K).indices.flatten().bincount(minlength=EXPERTS)
    with EverythingInDouble():
        theirs = qwen3_moe.load_balancing_loss_func((logits,), EXPERTS, TOP_K)
    ours = load_balancing_loss(probabilities[None], counts[None])
    # Theirs adds up the shares of the choices, of which each is 1 / K of ours.
    torch.testing.assert_close(TOP_K * ours.sum(), theirs, **FP64)


def test_z_loss_by_hand():
    logits = torch.tensor([[1.0, 3.0], [2.0, 2.0]], dtype=torch.float64).log()  # sums of exponentials: 4 and 4
    torch.testing.assert_close(router_z_loss(logits), torch.tensor(4.0).log().double().square())
    assert router_z_loss(torch.empty(0, 4)) == 0


def build() -> MoELayer:
    layer = MoELayer(HIDDEN, 3, EXPERTS, TOP_K, True).double()
    randomize(layer)
    return layer


def samples() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SEQUENCES, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)


def expected_gradient(params: RouterLossParameters) -> torch.Tensor:
    """Of the router, by the formula of the losses and autograd alone."""
    weight = build().router.gate.weight.detach().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    groups = samples() if params.scope == "sequence" else samples().flatten(0, 1)[None]
    for tokens in groups:
        logits = tokens @ weight.T
        probabilities = logits.softmax(-1)
        shares = probabilities.topk(TOP_K).indices.flatten().bincount(minlength=EXPERTS).double() / (
            TOP_K * len(tokens)
        )
        balance = EXPERTS * (shares * probabilities.mean(0)).sum()
        total = total + (params.load_balancing * balance + params.z_loss * logits.logsumexp(-1).square().mean())
    return torch.autograd.grad(total / len(groups), weight)[0]


def engine_gradient(degrees: dict[str, int], num_microbatches: int, params: RouterLossParameters) -> torch.Tensor:
    """Gradient of the router after a step whose own loss is 0, by the native loop's gradient manager."""
    context = DeviceMeshParameters(**degrees).build()
    layer = build()
    layer.use_router_losses(params, context.data_group if params.scope == "microbatch" else None)
    x = samples()
    if context.is_distributed:
        parallelize_expert_parallel(layer, context.mesh_for(EXPERT_DOMAIN)["ep_replicate", "ep_shard"])
        batch = context.mesh_for(BATCH_DOMAIN)
        parallelize_context(layer, batch["cp"])
        x = x.chunk(batch["dp"].size(), 0)[batch.get_local_rank("dp")]
        x = x.chunk(batch["cp"].size(), 1)[batch.get_local_rank("cp")]
    manager = GradientManager(context, TrackedModules(context, [layer], everything), GradientManagerConfig())
    microbatches = x.chunk(num_microbatches)
    with manager.install():
        manager.set_required_accumulations(num_microbatches)
        for index, microbatch in enumerate(microbatches):
            loss = announce_loss(0.0 * layer(microbatch).sum())
            weight = torch.tensor(float(len(microbatch) * microbatch.shape[1]))
            start = manager.add_loss_with_weight(loss, weight)
            manager.before_backward(0, is_last=index == num_microbatches - 1, is_split=False)
            start.backward()
        manager.sync_and_scale()
        return named_full_gradients(layer)["router.gate.weight"]


PARAMS = RouterLossParameters(load_balancing=COEFFICIENT, z_loss=0.01)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_one_process(num_microbatches: int):
    expected = expected_gradient(PARAMS)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(engine_gradient({}, num_microbatches, PARAMS), expected, **FP64)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("expert_parallel", [1, 2])
@pytest.mark.parametrize("dimension", ["data_parallel_replicate", "context_parallel_replicate"])
def test_two_ranks_have_the_gradient_of_one_process(dimension: str, expert_parallel: int):
    for num_microbatches in (1, 2, 4):
        degrees = {dimension: 2, "expert_parallel": expert_parallel}
        gradient = engine_gradient(degrees, num_microbatches, PARAMS)
        torch.testing.assert_close(gradient, expected_gradient(PARAMS), **FP64)


@pytest.mark.world_size(2)
def test_loads_of_all_ranks():
    params = RouterLossParameters(load_balancing=COEFFICIENT, scope="microbatch")
    gradient = engine_gradient({"data_parallel_replicate": 2}, 1, params)
    torch.testing.assert_close(gradient, expected_gradient(params), **FP64)
    # Each microbatch has loads of its own.
    assert not engine_gradient({"data_parallel_replicate": 2}, 4, params).allclose(gradient)


@pytest.mark.world_size(2)
def test_a_sharded_model_and_a_copy():
    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    layer = build()
    layer.use_router_losses(RouterLossParameters(load_balancing=COEFFICIENT, scope="microbatch"), dist.group.WORLD)
    twin = copy.deepcopy(layer)
    for module in (layer, twin):
        parallelize_replicate(module, context.mesh_for(DENSE_DOMAIN))
        announce_loss(module(samples()).sin().sum()).backward()
    assert_close_tree(named_full_gradients(twin), named_full_gradients(layer), rtol=0, atol=0)


def test_everything_else_stays_as_it_is():
    layer, plain = build(), build()
    layer.use_router_losses(PARAMS)
    x = samples().requires_grad_()
    assert torch.equal(layer(x), plain(x))
    announce_loss(layer(x).sum()).backward()
    plain(x).sum().backward()
    gradients, expected = named_full_gradients(layer), named_full_gradients(plain)
    difference = gradients.pop("router.gate.weight") - expected.pop("router.gate.weight")
    torch.testing.assert_close(difference, expected_gradient(PARAMS), **FP64)
    assert_close_tree(gradients, expected, rtol=0, atol=0)
    layer.use_router_losses(RouterLossParameters())
    layer(x).sum().backward()  # without any loss of its own


def test_no_tokens():
    layer = build()
    for scope in ("sequence", "microbatch"):
        layer.use_router_losses(RouterLossParameters(load_balancing=1.0, z_loss=1.0, scope=scope))
        for shape in ((0, 2), (2, 0)):
            announce_loss(layer(torch.empty(*shape, HIDDEN, dtype=torch.float64)).sum()).backward()
    assert not layer.router.gate.weight.grad.any()


def padded(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of 2 tokens among 4, of which one pair is at the end, and one sequence of padding alone; what counts."""
    x = torch.randn(SEQUENCES + 1, 4, HIDDEN, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    mask = torch.zeros(SEQUENCES + 1, 4, dtype=torch.int64)
    for index, sequence in enumerate(tokens):
        places = [2, 3] if index % 2 else [0, 1]
        x[index, places] = sequence
        mask[index, places] = 1
    return x, mask


@pytest.mark.parametrize("scope", ["sequence", "microbatch"])
def test_padding_is_no_load(scope: str):
    params = PARAMS.model_copy(update={"scope": scope})
    layer, plain = build(), build()
    layer.use_router_losses(params)
    x, mask = padded(samples())
    output = layer(x, mask)
    assert torch.equal(output, plain(x))
    announce_loss(0.0 * output.sum()).backward()
    torch.testing.assert_close(layer.router.gate.weight.grad, expected_gradient(params), **FP64)
    plain.reset_stats()
    plain(samples())
    assert torch.equal(layer.tokens_per_expert, plain.tokens_per_expert)
    layer.zero_grad()
    announce_loss(layer(x, torch.zeros_like(mask)).sum() * 0.0).backward()
    assert not layer.router.gate.weight.grad.any()
    with pytest.raises(ValueError, match=r"token_mask has shape \(4, 9\).* are of \(9, 4\) tokens"):
        layer(x, mask.T)


@pytest.mark.world_size(2)
def test_parts_with_padding():
    """Each rank has two of the four places of a sequence: of half of them all tokens, and of half of them none."""
    context = DeviceMeshParameters(context_parallel_replicate=2).build()
    layer = build()
    layer.use_router_losses(PARAMS)
    parallelize_context(layer, context.mesh_for(BATCH_DOMAIN)["cp"])
    x, mask = (whole.chunk(2, 1)[dist.get_rank()] for whole in padded(samples()))
    announce_loss(0.0 * layer(x, mask).sum()).backward()
    gradient = layer.router.gate.weight.grad / 2  # parts of equal weight
    dist.all_reduce(gradient)
    torch.testing.assert_close(gradient, expected_gradient(PARAMS), **FP64)


@pytest.mark.world_size(2)
def test_parts_with_unequal_numbers_of_labels():
    """The recipe of the docs: labels of whole sequences, over the number of ranks."""
    context = DeviceMeshParameters(context_parallel_replicate=2).build()
    x = torch.randn(SEQUENCES, 4, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    is_label = torch.rand(SEQUENCES, 4, generator=torch.Generator().manual_seed(6)) < 0.6
    is_label[:3, 2:] = False
    cut = SequenceSharding.of(context)
    assert len({int(cut_mask.sum()) for cut_mask in cut.parts(is_label, 1)}) == 2  # else the test shows nothing
    split, single = build(), build()
    for layer in (split, single):
        layer.use_router_losses(PARAMS)
    parallelize_context(split, context.mesh_for(BATCH_DOMAIN)["cp"])
    parallelize_replicate(split, context.mesh_for(DENSE_DOMAIN))
    manager = GradientManager(context, TrackedModules(context, [split], everything), GradientManagerConfig())
    microbatches = list(zip(x.split(2), is_label.split(2), strict=True))
    with manager.install():
        manager.set_required_accumulations(len(microbatches))
        for index, (tokens, labels) in enumerate(microbatches):
            weight = labels.sum() / cut.num_ranks
            loss = (split(cut.shard(tokens)).sin().sum(-1) * cut.shard(labels)).sum() / weight
            start = manager.add_loss_with_weight(announce_loss(loss), weight)
            manager.before_backward(0, is_last=index == len(microbatches) - 1, is_split=False)
            start.backward()
        manager.sync_and_scale()
        for tokens, labels in microbatches:
            loss = (single(tokens).sin().sum(-1) * labels).sum() / labels.sum()
            (announce_loss(loss) * labels.sum() / is_label.sum()).backward()
        assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)


@pytest.mark.world_size(2)
def test_loads_of_other_sequences_are_refused():
    with pytest.raises(ValueError, match=r"scope 'sequence' are not counted over a group \(of 2 ranks\)"):
        build().use_router_losses(PARAMS, dist.group.WORLD)


def test_a_reentrant_checkpoint_awaits_the_scale(monkeypatch: pytest.MonkeyPatch):
    """Before any loss was attached, the engines would not announce theirs."""
    monkeypatch.setattr(LOSS_SCALE, "num_attached", 0)
    layer = build()
    layer.use_router_losses(PARAMS)
    output = checkpoint(layer, samples().requires_grad_(), use_reentrant=True)
    assert LOSS_SCALE.is_awaited
    announce_loss(0.0 * output.sum()).backward()
    torch.testing.assert_close(layer.router.gate.weight.grad, expected_gradient(PARAMS), **FP64)
