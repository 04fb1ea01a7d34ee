"""Pattern plans over the blocks of models: a step of one process, and what plans may not say."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.dist_ops import all_gather
from d9d.core.protocol import MixesTokens
from d9d.loop.component import GradientManager, TrackedModules
from d9d.loop.component.tracked_modules import everything
from d9d.loop.config import GradientManagerConfig
from d9d.module.block.head import SequencePoolingHeadShared
from d9d.module.block.moe import MoELayer, RouterLossParameters
from d9d.module.model import ClassificationHeadConfig, DecoderForClassification
from d9d.module.model.io import SequenceHeadShared, SequenceInput
from d9d.module.parallelism.api import SequenceSharding
from d9d.module.parallelism.explain import explain_plan, predict_layouts, read_layouts
from d9d.module.parallelism.plan import ParallelPlan, resolve_plan
from d9d.module.parallelism.plan_apply import parallelize_by_plan
from d9d.pipelining.api import StageBoundary
from tests.d9d.module.block.oracles import FP64, randomize
from tests.d9d.module.model.catalogue import CATALOGUE, HIDDEN, tokens
from tests.d9d.module.model.test_distributed import causal_lm, losses_of, part_of_losses, sequence_of, synchronized
from tests.harness.parity import assert_close_tree, named_full_gradients, named_full_parameters, sgd_step

DENSE, MOE, LATENT = "qwen3 dense", "qwen3 moe", "deepseek v3"
BLOCKS = {
    "backbone.embed_tokens": "vocab",
    "backbone.layers.*.self_attn": "attention",
    "head": "vocab",
}
FFN, EXPERTS = {"backbone.layers.*.mlp": "ffn"}, {"backbone.layers.*.mlp": "expert"}
FIRST_DENSE = {"backbone.layers.0.mlp": "ffn", "backbone.layers.1.mlp": "expert"}
NORMS = {"backbone.layers.*.*_layernorm": "sequence", "backbone.norm": "sequence"}


def plan_of(patterns: Any) -> ParallelPlan:
    return ParallelPlan.read(patterns, 100, None, None)


def check(name: str, patterns: Any, **degrees: int) -> nn.Module:
    """Losses, gradients and a step, and the table that was foretold."""
    params = DeviceMeshParameters(**degrees)
    context = params.build()
    split, single = causal_lm(name, False), causal_lm(name, False)
    predicted = predict_layouts(single, resolve_plan(single, plan_of(patterns), params), params)
    parallelize_by_plan(split, context, plan_of(patterns))
    read = read_layouts(split)
    assert {key: (each.domain, each.placements) for key, each in read.items()} == {
        key: (each.domain, each.placements) for key, each in predicted.items()
    }
    if torch.distributed.get_rank() == 0:
        assert {key: each.local_bytes for key, each in read.items()} == {
            key: each.local_bytes for key, each in predicted.items()
        }
    manager = GradientManager(context, TrackedModules(context, [split], everything), GradientManagerConfig())
    with manager.install():
        manager.set_required_accumulations(1)
        losses = losses_of(split, tokens(seed=context.dp_rank))
        start = manager.add_loss_with_weight(losses.sum(), None)
        manager.before_backward(0, is_last=True, is_split=False)
        start.backward()
        manager.after_backward(0, is_last=True, is_split=False)
        manager.sync_and_scale()
        for rank in range(params.data_ranks):
            (losses_of(single, tokens(seed=rank)).sum() / params.data_ranks).backward()
        assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)
        for model in (split, single):
            sgd_step(model)
        assert_close_tree(named_full_parameters(split), named_full_parameters(single), **FP64)
    return split


@pytest.mark.world_size(2)
def test_a_stage_that_was_built_by_itself_is_distributed_by_names():
    params = DeviceMeshParameters(tensor_parallel=2)
    context, plan = params.build(), plan_of({**BLOCKS, **FFN, **NORMS})
    whole, stage, direct = (causal_lm(DENSE, False) for _ in range(3))
    resolved = resolve_plan(whole, plan, params)
    parallelize_by_plan(stage, context, plan, resolved=resolved)
    parallelize_by_plan(direct, context, plan)
    expected = {key: each.placements for key, each in read_layouts(direct).items()}
    assert {key: each.placements for key, each in read_layouts(stage).items()} == expected
    assert any("Shard" in repr(placements) or "dim" in repr(placements) for placements in expected.values())
    with pytest.raises(ValueError, match=r"the stage has none of the .* layers that the plan names"):
        parallelize_by_plan(nn.Sequential(nn.Linear(2, 2)), context, plan, resolved=resolved)


@pytest.mark.world_size(2)
def test_ids_that_no_rank_has_are_refused():
    context = DeviceMeshParameters(tensor_parallel=2).build()
    split = causal_lm(DENSE, False)
    parallelize_by_plan(split, context, plan_of({**BLOCKS, **FFN, **NORMS}))
    with pytest.raises(IndexError, match="the vocabularies have"):
        losses_of(split, tokens(seed=0) + 10_000)


@pytest.mark.world_size(2, timeout_s=180.0)
@pytest.mark.parametrize(
    ("name", "patterns", "degrees"),
    [
        (DENSE, {**BLOCKS, **FFN, **NORMS}, {"tensor_parallel": 2}),
        (DENSE, {"backbone.layers.*": "shard", "head": "replicate"}, {"data_parallel_shard": 2}),
        (MOE, EXPERTS, {"data_parallel_replicate": 2, "expert_parallel": 2}),
        (DENSE, None, {"data_parallel_shard": 2}),
        (LATENT, {**BLOCKS, **FIRST_DENSE}, {"tensor_parallel": 2}),
        pytest.param(LATENT, {**BLOCKS, **FIRST_DENSE, **NORMS}, {"tensor_parallel": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=["sequence", "some shards", "experts", "default", "shared expert", "shared expert and sequence"],
)
def test_two_ranks(name: str, patterns: Any, degrees: dict[str, int]):
    check(name, patterns, **degrees)


@pytest.mark.world_size(4, timeout_s=180.0)
@pytest.mark.parametrize(
    ("name", "patterns", "degrees"),
    [
        (
            MOE,
            {**BLOCKS, **EXPERTS, **NORMS},
            {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2},
        ),
        pytest.param(
            DENSE,
            {**BLOCKS, **FFN, "backbone.layers.*.self_attn": "attention_shared_kv"},
            {"tensor_parallel": 4},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            DENSE,
            {**BLOCKS, **FFN},
            {"data_parallel_replicate": 2, "tensor_parallel": 2},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["experts, sequence and shards", "heads that ranks share", "replicas of split layers"],
)
def test_four_ranks(name: str, patterns: Any, degrees: dict[str, int]):
    check(name, patterns, **degrees)


@pytest.mark.parametrize(
    ("name", "patterns", "degrees", "message"),
    [
        (DENSE, {**BLOCKS, **FFN}, {"tensor_parallel": 3}, r"self_attn, which does not fit: 4 query heads and 2 key"),
        (DENSE, {"backbone.layers.*.mlp": "attention"}, {"tensor_parallel": 2}, r"is a SwiGLU, but 'attention' is for"),
        (DENSE, {**BLOCKS, **NORMS}, {"tensor_parallel": 2}, r"do not: backbone\.layers\.\{0-1\}\.mlp"),
        (
            DENSE,
            {**BLOCKS, **FFN, **NORMS, "backbone.layers.*.mlp.up_proj": "colwise"},
            {"tensor_parallel": 2},
            r"inside of 'backbone\.layers\.0\.mlp', all of which 'ffn' splits.*'sequence' is for plans of whole blocks",
        ),
        (DENSE, {"backbone.layers.*.attention": "attention"}, {"tensor_parallel": 2}, r"nearest are .*self_attn"),
        (DENSE, None, {"tensor_parallel": 2}, r"self_attn \('attention'\), .*mlp \('ffn'\), head \('vocab'\)"),
        (MOE, None, {"data_parallel_shard": 2, "expert_parallel": 2}, r"nothing says which layers have experts"),
        (
            DENSE,
            {**FFN, "backbone.layers.*.self_attn": "attention_shared_kv"},
            {"tensor_parallel": 3},
            r"Set tensor_parallel to one of 1, 2, 4\.$",
        ),
        (LATENT, {**BLOCKS, **FIRST_DENSE}, {"tensor_parallel": 3}, r"self_attn, which does not fit: 4 query heads"),
        (
            DENSE,
            {"backbone.layers.0": "context"},
            {"context_parallel_shard": 2},
            r"but backbone\.layers\.1\.self_attn\.sdpa would see, .*the tokens of their own",
        ),
        (
            DENSE,
            {"backbone": "context", "backbone.layers.*": "context"},
            {"context_parallel_shard": 2},
            r"backbone\.layers\.\{0-1\} are inside of others",
        ),
    ],
)
def test_what_is_wrong_with_a_plan(name: str, patterns: Any, degrees: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        resolve_plan(causal_lm(name, False), plan_of(patterns), DeviceMeshParameters(**degrees))


def test_patterns_that_are_no_strings_are_named_beside_the_rest():
    patterns = {3: "shard", None: "nothing", "laers.*": "shard"}
    with pytest.raises(ValueError, match=r"'laers\.\*' matches no submodule") as caught:
        resolve_plan(nn.Linear(2, 2), plan_of(patterns), DeviceMeshParameters())
    for said in ("3 is no pattern of submodule names", "None is no pattern of", "None: unknown placement 'nothing'"):
        assert str(caught.value).count(said) == 1


def test_router_losses_have_to_be_within_a_context():
    """Those of layers beside it would balance the parts of sequences; without losses nothing is counted."""
    model, params = causal_lm(MOE, False), DeviceMeshParameters(context_parallel_shard=2)
    attention = plan_of({"backbone.layers.*.self_attn": "context"})
    resolve_plan(model, attention, params)
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.use_router_losses(RouterLossParameters(load_balancing=0.1))
    with pytest.raises(ValueError, match=r"but backbone\.layers\.\{0-1\}\.mlp would see, or count for router losses"):
        resolve_plan(model, attention, params)
    resolve_plan(model, plan_of({"backbone.layers.*": "context"}), params)


class Parts(nn.Module):
    """A block of torch's layers with a dropout between those that are split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)


@pytest.mark.world_size(2)
def test_widths_that_ranks_do_not_divide():
    """A DTensor knows what its peers have."""
    context = DeviceMeshParameters(tensor_parallel=2).build()
    single = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4)).double()
    randomize(single)
    split = copy.deepcopy(single)
    with pytest.raises(ValueError, match=r"0, which has 7 features .*'colwise_dtensor' in front of 'rowwise' take any"):
        resolve_plan(single, plan_of({"0": "colwise", "2": "rowwise"}), context.mesh_params)
    parallelize_by_plan(split, context, plan_of({"0": "colwise_dtensor", "2": "rowwise"}))
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    outputs, expected = split(x), single(x)
    torch.testing.assert_close(outputs, expected, **FP64)
    for output in (outputs, expected):
        output.sin().sum().backward()
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)


@pytest.mark.world_size(2)
def test_stages_hand_on_parts_of_the_tokens():
    params = DeviceMeshParameters(tensor_parallel=2)
    context, plan = params.build(), plan_of({**BLOCKS, **FFN, **NORMS})
    split = causal_lm(DENSE, False)
    parallelize_by_plan(split, context, plan)
    spec = split.stage_transfer_spec(SequenceInput(input_ids=tokens(2, 8)), StageBoundary.outgoing)
    assert spec.hidden_states.shape == (2, 4, HIDDEN)
    kept = nn.ModuleDict({"backbone": CATALOGUE[DENSE].build(False, mode="mean"), "head": causal_lm(DENSE, False).head})
    with pytest.raises(NotImplementedError, match="'mean' needs all tokens of a sequence on each rank"):
        parallelize_by_plan(kept, context, plan)


@pytest.mark.world_size(2)
def test_words_for_dropout_and_heads_that_pool():
    params = DeviceMeshParameters(tensor_parallel=2)
    context = params.build()
    block = Parts()
    parallelize_by_plan(block, context, plan_of({"up": "colwise", "dropout": "dropout", "down": "rowwise"}))
    torch.manual_seed(0)
    assert not equal_on_all_ranks(block.dropout(torch.ones(64)))
    backbone = CATALOGUE[DENSE].build(False)
    model = DecoderForClassification(backbone, ClassificationHeadConfig(num_labels=3, dropout=0.5), backbone.stage)
    randomize(model.double())
    patterns = {**BLOCKS, **FFN, **NORMS}
    with pytest.raises(
        ValueError, match=r"head\.dropout would drop the same of each part.*do not: head\.score\.weight"
    ):
        resolve_plan(model, plan_of({key: word for key, word in patterns.items() if key != "head"}), params)
    single = copy.deepcopy(model)
    parallelize_by_plan(model, context, plan_of({**patterns, "head": "pooling"}))
    ids = tokens()
    shared = SequenceHeadShared(
        sequence=sequence_of(ids), head=SequencePoolingHeadShared(pooling_mask=torch.ones_like(ids))
    )
    scores, expected = (each.eval()(SequenceInput(input_ids=ids), shared).scores for each in (model, single))
    torch.testing.assert_close(scores, expected, **FP64)
    synchronizer = synchronized(model)
    for each in (scores, expected):
        each.sin().sum().backward()
    synchronizer.wait()
    assert_close_tree(named_full_gradients(model), named_full_gradients(single), **FP64)


def equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    return all(torch.equal(tensor, other) for other in all_gather(tensor, torch.distributed.group.WORLD))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("word", ["context", "context_all_gather"])
def test_attention_to_the_tokens_of_all_ranks(word: str):
    params = DeviceMeshParameters(context_parallel_shard=2)
    context = params.build()
    split, single = causal_lm(MOE, False), causal_lm(MOE, False)
    parallelize_by_plan(split, context, plan_of({"backbone": word}))
    ids, cut = tokens(), SequenceSharding.of(context)
    losses = part_of_losses(split, ids, cut)
    torch.testing.assert_close(cut.gather(losses), losses_of(single, ids), **FP64)
    assert {module.context_parallel_degree for module in split.modules() if isinstance(module, MixesTokens)} == {2}


def test_words_from_a_file_are_explained(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("".join(f"'{pattern}': {word}\n" for pattern, word in {**BLOCKS, **EXPERTS}.items()))
    params = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2, expert_parallel=2)
    text = explain_plan(causal_lm(MOE, False), plan_of(str(path)), params)
    rows = {line.split()[0]: [cell.strip() for cell in line.split("  ") if cell] for line in text.splitlines()}
    # 29 x 16 doubles, of which the first rank has 15 rows of 29, and 8 of these.
    assert rows["backbone.embed_tokens.token_embedding.regular.weight"][2:6] == [
        "dense",
        "dp_cp_shard dim 0, tp dim 0",
        "float64",
        f"{8 * 16 * 8 / 1024:.1f} KiB",
    ]
    # 2 of 4 experts of 16 x 12 doubles, in 2 layers.
    assert rows["backbone.layers.{0-1}.mlp.grouped_experts.up_proj.weight"][2:6] == [
        "expert",
        "ep_shard dim 0",
        "float64",
        f"{2 * 2 * 16 * 12 * 8 / 1024:.1f} KiB",
    ]
