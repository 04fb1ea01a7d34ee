"""Every model of the catalogue on meshes and in stages: losses, all gradients and a step of one process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.placement import local_tensor
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.model_state.io import load_model_state, save_model_state
from d9d.module.block.head import (
    LM_IGNORE_INDEX,
    SequenceCausalLMHeadShared,
    SequencePoolingHeadShared,
)
from d9d.module.model import (
    AnyHeadConfig,
    CausalLMHeadConfig,
    ClassificationHeadConfig,
    DecoderForCausalLM,
    DecoderWithHeads,
    EmbeddingHeadConfig,
    build_decoder_head,
)
from d9d.module.model.io import SequenceHeadShared, SequenceHeadsShared, SequenceInput, SequenceShared
from d9d.module.parallelism.api import SequenceSharding
from d9d.module.parallelism.model import (
    parallelize_causal_lm_head,
    parallelize_decoder,
    parallelize_qwen3_dense_model,
)
from d9d.pipelining.api import PipelineStageInfo, StageBoundary
from tests.d9d.module.block.oracles import FP64, randomize
from tests.d9d.module.model.catalogue import CATALOGUE, HIDDEN, tokens
from tests.harness.parity import assert_close_tree, named_full_gradients, named_full_parameters, sgd_step
from tests.harness.pipelines import build_pipeline, build_whole, run_whole

WHOLE = PipelineStageInfo(0, 1)
ALL = pytest.mark.parametrize("name", CATALOGUE)
BOTH_TIES = pytest.mark.parametrize("tied", [False, True])
LIMIT_S = 180.0  # each operation of a split layer goes through DTensor, in Python
WITH_TIES_AND_PARTS = [(name, tied, parts) for name in CATALOGUE for tied in (False, True) for parts in (False, True)]
MOE = ["qwen3 moe", "deepseek v3"]


def sample(cases: list[tuple[Any, ...]], *, default: tuple[Any, ...], names: Iterable[str] = CATALOGUE) -> list[Any]:
    """Leave the cases that end in other values than the default, or are of other models, to exhaustive runs."""
    return [
        case if case[0] in names and case[1:] == default else pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in cases
    ]


def sequence_of(ids: torch.Tensor) -> SequenceShared:
    return SequenceShared(position_ids=torch.arange(ids.shape[1]).expand_as(ids))


def lm_head_of(ids: torch.Tensor) -> SequenceCausalLMHeadShared:
    labels = ids.roll(-1, 1)
    labels[:, -1] = LM_IGNORE_INDEX
    return SequenceCausalLMHeadShared(labels=labels)


def causal_lm_shared(ids: torch.Tensor) -> SequenceHeadShared[SequenceCausalLMHeadShared]:
    return SequenceHeadShared(sequence=sequence_of(ids), head=lm_head_of(ids))


def causal_lm(name: str, tied: bool, stage: PipelineStageInfo = WHOLE, **kwargs: Any) -> DecoderForCausalLM[Any]:
    """A stage with the same values in every cut."""
    model = DecoderForCausalLM(CATALOGUE[name].build(tied, stage, **kwargs), stage).double()
    for parameter_name, parameter in model.named_parameters(remove_duplicate=False):
        fill_by_name(parameter_name, parameter, tied)
    return model


def fill_by_name(name: str, parameter: nn.Parameter, tied: bool) -> None:
    if tied:
        name = name.replace("head.lm_head", "backbone.embed_tokens.token_embedding")
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def losses_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(SequenceInput(input_ids=ids), causal_lm_shared(ids)).cross_entropy


def synchronized(model: nn.Module) -> GradientSynchronizer:
    synchronizer = GradientSynchronizer([list(model.parameters())], 1)
    synchronizer.bind()
    synchronizer.set_required_accumulations(1)
    return synchronizer


def part_of_losses(model: nn.Module, ids: torch.Tensor, cut: SequenceSharding) -> torch.Tensor:
    """The losses of this rank's part of a sequence, which is all of it without context parallelism."""
    shared = SequenceHeadShared(
        sequence=SequenceShared(position_ids=cut.position_ids(ids.shape[1]).expand(len(ids), -1)),
        head=SequenceCausalLMHeadShared(labels=cut.shard(lm_head_of(ids).labels)),
    )
    return model(SequenceInput(input_ids=cut.shard(ids)), shared).cross_entropy


def assert_step_equals_one_process(
    split: nn.Module, single: nn.Module, context: DistributedContext, cut: SequenceSharding
) -> None:
    """Every rank with data of its own takes a batch of its own; a process takes all of them."""
    synchronizer = synchronized(split)
    losses = part_of_losses(split, tokens(seed=context.dp_rank), cut)
    losses.sum().backward()
    synchronizer.wait()
    for rank in range(context.mesh_params.data_ranks // cut.num_ranks):
        expected = losses_of(single, tokens(seed=rank))
        expected.sum().backward()
        if rank == context.dp_rank:
            torch.testing.assert_close(losses, cut.shard(expected), **FP64)
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)
    for model in (split, single):
        sgd_step(model)
    assert_close_tree(named_full_parameters(split), named_full_parameters(single), **FP64)


def assert_mesh_equals_one_process(name: str, tied: bool, params: DeviceMeshParameters, **kwargs: Any) -> nn.Module:
    context = params.build()
    split, single = causal_lm(name, tied), causal_lm(name, tied)
    parallelize_decoder(context, split, WHOLE, **kwargs)
    order = kwargs.get("context_order", "zigzag")
    assert_step_equals_one_process(split, single, context, SequenceSharding.of(context, order))
    return split


@pytest.mark.world_size(4, timeout_s=LIMIT_S)
@pytest.mark.parametrize(("name", "tied", "sequence_parallel"), sample(WITH_TIES_AND_PARTS, default=(False, True)))
def test_tensor_parallel_shards(name: str, tied: bool, sequence_parallel: bool):
    params = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2)
    split = assert_mesh_equals_one_process(name, tied, params, sequence_parallel=sequence_parallel)
    for weight in ("embed_tokens.token_embedding.regular", "layers.0.self_attn.o_proj"):
        parameter = split.backbone.get_submodule(weight).weight
        row = parameter.numel() // len(parameter)
        # A quarter, and a row more where there is a rest.
        assert local_tensor(parameter).numel() <= parameter.numel() // 4 + row


@pytest.mark.world_size(4, timeout_s=LIMIT_S)
@pytest.mark.parametrize(
    ("name", "tied", "sequence_parallel"),
    sample(
        [case for case in WITH_TIES_AND_PARTS if case[0] != "deepseek v3"], default=(True, True), names=["qwen3 dense"]
    ),
)
def test_more_ranks_than_key_and_value_heads(name: str, tied: bool, sequence_parallel: bool):
    """Two of them on four ranks, if asked."""
    split = assert_mesh_equals_one_process(
        name,
        tied,
        DeviceMeshParameters(tensor_parallel=4),
        sequence_parallel=sequence_parallel,
        replicate_kv_heads=True,
    )
    attention = split.backbone.layers["0"].self_attn
    assert len(local_tensor(attention.k_proj.weight)) == len(attention.k_proj.weight)
    assert 4 * len(local_tensor(attention.q_proj.weight)) == len(attention.q_proj.weight)


@pytest.mark.world_size(4, timeout_s=LIMIT_S)
@pytest.mark.parametrize(
    "degrees",
    [
        {"data_parallel_replicate": 2, "tensor_parallel": 2},
        pytest.param({"data_parallel_replicate": 2, "data_parallel_shard": 2}, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    ("name", "tied"), sample([(name, True) for name in CATALOGUE], default=(True,), names=["qwen3 dense"])
)
def test_replicas(name: str, tied: bool, degrees: dict[str, int]):
    assert_mesh_equals_one_process(name, tied, DeviceMeshParameters(**degrees))


@pytest.mark.world_size(4, timeout_s=LIMIT_S)
@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize(
    "degrees",
    [
        {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2},
        pytest.param(
            {"data_parallel_replicate": 2, "data_parallel_shard": 2, "expert_parallel": 2}, marks=pytest.mark.exhaustive
        ),
        pytest.param({"data_parallel_shard": 4, "expert_parallel": 4}, marks=pytest.mark.exhaustive),
    ],
)
def test_experts_over_ranks(name: str, degrees: dict[str, int]):
    params = DeviceMeshParameters(**degrees)
    split = assert_mesh_equals_one_process(name, False, params, sequence_parallel=True)
    weight = dict(split.named_parameters())["backbone.layers.1.mlp.grouped_experts.up_proj.weight"]
    assert len(local_tensor(weight)) * params.expert_parallel == len(weight)


@pytest.mark.world_size(2, timeout_s=LIMIT_S)
@pytest.mark.parametrize(
    ("name", "method"),
    sample(
        [(name, method) for name in CATALOGUE for method in ("ring", "all_gather")],
        default=("ring",),
        names=["qwen3 moe", "deepseek v3"],
    ),
)
def test_parts_of_sequences(name: str, method: str):
    """Experts are shared by the same ranks."""
    experts = {"expert_parallel": 2} if name in MOE else {}
    params = DeviceMeshParameters(context_parallel_shard=2, **experts)
    assert_mesh_equals_one_process(name, False, params, context_method=method)


@pytest.mark.world_size(2)
def test_means_of_whole_sequences():
    """Hidden states of layers, averaged over the tokens of two ranks; but not over parts of tensor-parallel ones."""
    context = DeviceMeshParameters(context_parallel_replicate=2).build()
    split, single = (CATALOGUE["qwen3 dense"].build(False, mode="mean").double() for _ in range(2))
    for model in (split, single):
        randomize(model)
    parallelize_decoder(context, split, WHOLE)
    synchronizer = synchronized(split)
    ids, cut = tokens(), SequenceSharding.of(context)
    mask = (tokens(seed=1) > 10).long()
    own, whole = (
        SequenceShared(position_ids=positions.expand(len(ids), -1), hidden_states_agg_mask=part)
        for positions, part in ((cut.position_ids(8), cut.shard(mask)), (torch.arange(8)[None], mask))
    )
    means = split(SequenceInput(input_ids=cut.shard(ids)), own).hidden_states_snapshot
    expected = single(SequenceInput(input_ids=ids), whole).hidden_states_snapshot
    torch.testing.assert_close(means, expected, **FP64)
    (means.sin().sum() / cut.num_ranks).backward()
    expected.sin().sum().backward()
    synchronizer.wait()
    expected_gradients = {name: gradient for name, gradient in named_full_gradients(single).items() if gradient.any()}
    found = named_full_gradients(split)
    assert_close_tree({name: found[name] for name in expected_gradients}, expected_gradients, **FP64)
    assert len(expected_gradients) > 20


@pytest.mark.world_size(2)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_padding_is_no_load_of_experts(checkpointed: bool):
    """Whole masks under sequence parallelism; layers that are computed again count once."""
    context = DeviceMeshParameters(tensor_parallel=2).build()
    split, single = (CATALOGUE["qwen3 moe"].build(False, checkpointed=checkpointed) for _ in range(2))
    for model in (split, single):
        randomize(model)
    parallelize_decoder(context, split, WHOLE, sequence_parallel=True)
    ids = tokens()
    mask = (tokens(seed=1) > 10).long()
    shared = SequenceShared(position_ids=torch.arange(8).expand_as(ids), token_mask=mask)
    for model in (split, single):
        model(SequenceInput(input_ids=ids), shared).hidden_states.sum().backward()
    for layer, other in zip(split.decoder_layers, single.decoder_layers, strict=True):
        assert torch.equal(layer.mlp.tokens_per_expert, other.mlp.tokens_per_expert)
        assert layer.mlp.tokens_per_expert.sum() == 2 * mask.sum()  # of two experts each
    assert 0 < mask.sum() < mask.numel()


@pytest.mark.world_size(2)
def test_means_of_parts_are_refused():
    kept = CATALOGUE["qwen3 dense"].build(False, mode="mean")
    context = DeviceMeshParameters(tensor_parallel=2).build()
    with pytest.raises(NotImplementedError, match=r"'mean' needs all tokens .* without sequence parallelism"):
        parallelize_decoder(context, kept, WHOLE, sequence_parallel=True)


@pytest.mark.exhaustive
@pytest.mark.world_size(4, timeout_s=LIMIT_S)
@ALL
@pytest.mark.parametrize(
    "degrees",
    [
        {"context_parallel_replicate": 2, "tensor_parallel": 2},
        {"context_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 2},
        {"context_parallel_shard": 2, "data_parallel_shard": 2},
    ],
)
def test_parts_of_sequences_and_more(name: str, degrees: dict[str, int]):
    params = DeviceMeshParameters(**degrees)
    assert_mesh_equals_one_process(name, True, params, sequence_parallel=True, context_order="contiguous")


@ALL
@BOTH_TIES
def test_stages_on_one_process(name: str, tied: bool):
    stages = build_whole(2, lambda stage: causal_lm(name, tied, stage, checkpointed=True))
    whole, ids = causal_lm(name, tied), tokens()
    losses = run_whole(stages, SequenceInput(input_ids=ids), causal_lm_shared(ids)).cross_entropy
    expected = losses_of(whole, ids)
    torch.testing.assert_close(losses, expected, **FP64)
    losses.sum().backward()
    expected.sum().backward()
    found = [named_full_gradients(stage) for stage in stages]
    merged = {**found[0], **found[1]}
    if tied:  # what the engine sums over the stages
        for vocabulary in ("regular", "added"):
            embedding = f"backbone.embed_tokens.token_embedding.{vocabulary}.weight"
            merged[embedding] = merged[embedding] + merged.pop(f"head.lm_head.{vocabulary}.weight")
            assert stages[0].tied_parameters()[embedding] == f"vocabulary {vocabulary}"
    assert_close_tree(merged, named_full_gradients(whole), **FP64)
    declared = [stage.tied_parameters() for stage in stages]
    assert [len(names) for names in declared] == ([2, 2] if tied else [0, 0])


@pytest.mark.world_size(2)
@ALL
@pytest.mark.parametrize("schedule", ["1f1b_1", "zero_bubble_v"])
def test_stages_on_two_ranks(name: str, schedule: str):
    """Two stages of one layer each; or four, of which the first and the last have none, as embeddings and heads count."""
    pipeline = build_pipeline(schedule, 2, lambda stage: causal_lm(name, False, stage))
    whole = causal_lm(name, False)
    batches = [tokens(seed=index) for index in range(3)]
    losses: dict[int, torch.Tensor] = {}

    def loss_of(output: Any, index: int) -> torch.Tensor:
        losses[index] = output.cross_entropy.detach()
        return output.cross_entropy.sum()

    pipeline.executor.step(
        tuple(SequenceInput(input_ids=ids) for ids in batches), tuple(map(causal_lm_shared, batches)), loss_of
    )
    for index, ids in enumerate(batches):
        expected = losses_of(whole, ids)
        expected.sum().backward()
        if pipeline.has_last_stage:
            torch.testing.assert_close(losses[index], expected, **FP64)
    expected_gradients = named_full_gradients(whole)
    for stage in pipeline.modules.values():
        found = named_full_gradients(stage)
        assert_close_tree(found, {name: expected_gradients[name] for name in found}, **FP64)
        assert found.keys() == dict(stage.named_parameters()).keys()


@pytest.mark.world_size(2, timeout_s=LIMIT_S)
def test_heads_that_pool_see_all_tokens():
    """Under sequence parallelism; several heads at once, one of them tied to the embeddings."""
    params = DeviceMeshParameters(tensor_parallel=2)
    split, single = several_heads(), several_heads()
    parallelize_decoder(params.build(), split, WHOLE, sequence_parallel=True)
    synchronizer = synchronized(split)
    ids = tokens()
    mask = (tokens(seed=1) > 10).long()
    pooled = SequencePoolingHeadShared(pooling_mask=mask)
    shared = SequenceHeadsShared(
        sequence=sequence_of(ids), heads={"lm": lm_head_of(ids), "classes": pooled, "vectors": pooled}
    )
    outputs, expected = (model(SequenceInput(input_ids=ids), shared) for model in (split, single))
    torch.testing.assert_close(outputs["classes"].scores, expected["classes"].scores, **FP64)
    torch.testing.assert_close(outputs["vectors"].embeddings, expected["vectors"].embeddings, **FP64)
    torch.testing.assert_close(outputs["lm"].cross_entropy, expected["lm"].cross_entropy, **FP64)
    for each in (outputs, expected):
        total = each["classes"].scores.sin().sum() + each["vectors"].embeddings.sin().sum()
        (total + each["lm"].cross_entropy.sum()).backward()
    synchronizer.wait()
    assert_close_tree(named_full_gradients(split), named_full_gradients(single), **FP64)
    with pytest.raises(ValueError, match=r"has the heads \['classes', 'lm', 'vectors'\], .* for \['lm'\]"):
        split(
            SequenceInput(input_ids=ids), SequenceHeadsShared(sequence=sequence_of(ids), heads={"lm": lm_head_of(ids)})
        )


def several_heads() -> DecoderWithHeads[Any, Any, Any]:
    backbone = CATALOGUE["qwen3 dense"].build(True)
    configs: dict[str, AnyHeadConfig] = {
        "lm": CausalLMHeadConfig(),
        "classes": ClassificationHeadConfig(num_labels=3),
        "vectors": EmbeddingHeadConfig(embedding_dim=5, normalize=True),
    }
    heads = {name: build_decoder_head(config, backbone=backbone) for name, config in configs.items()}
    model = DecoderWithHeads(backbone, heads, WHOLE).double()
    randomize(model)
    return model


@pytest.mark.world_size(2)
def test_refusals():
    context = DeviceMeshParameters(tensor_parallel=2).build()
    model = causal_lm("qwen3 dense", True)
    with pytest.raises(ValueError, match=r"weights of the embeddings .* Call parallelize_decoder with the whole"):
        parallelize_causal_lm_head(model.head, context)
    with pytest.raises(ValueError, match=r"built for stage 0 of 1, not for 0 of 2"):
        parallelize_decoder(context, model, PipelineStageInfo(0, 2))
    kept = CATALOGUE["qwen3 dense"].build(False, mode="mean")
    with pytest.raises(NotImplementedError, match=r"'mean' needs all tokens of a sequence on each rank"):
        parallelize_qwen3_dense_model(context, kept, WHOLE, sequence_parallel=True)
    parts = CATALOGUE["qwen3 dense"].build(False)
    parallelize_decoder(context, parts, WHOLE, sequence_parallel=True)
    spec = parts.stage_transfer_spec(SequenceInput(input_ids=tokens(2, 6)), StageBoundary.outgoing)
    assert spec.hidden_states.shape == (2, 3, HIDDEN)
    with pytest.raises(ValueError, match="7 tokens are to be cut into 2 equal parts"):
        parts.stage_transfer_spec(SequenceInput(input_ids=tokens(2, 7)), StageBoundary.outgoing)


@pytest.mark.world_size(4)
@ALL
@BOTH_TIES
def test_files_into_a_mesh_and_out_of_it(name: str, tied: bool, tmp_path: Path):
    """Every tensor of a Hugging Face checkpoint comes back bit by bit, through shards of split layers and experts."""
    row, has_experts = CATALOGUE[name], name in MOE
    context = DeviceMeshParameters(
        data_parallel_shard=2, tensor_parallel=2, expert_parallel=2 if has_experts else 1
    ).build()
    single, split = causal_lm(name, tied).float(), DecoderForCausalLM(row.build(tied), WHOLE)
    parallelize_decoder(context, split, WHOLE)
    export = row.mapper(row.causal_lm.export, tied)
    save_model_state(tmp_path / "source", export, single, show_progress=False)
    load = row.mapper(row.causal_lm.load, tied)
    load_model_state(tmp_path / "source", load, "cpu", split, show_progress=False, process_group=dist.group.WORLD)
    assert_close_tree(named_full_parameters(split), named_full_parameters(single), rtol=0.0, atol=0.0)
    save_model_state(tmp_path / "mesh", export, split, show_progress=False)
    source, written = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "mesh"))
    assert_close_tree(written, source, rtol=0.0, atol=0.0)


@pytest.mark.world_size(2)
def test_stages_hand_on_what_they_say_in_mixed_precision():
    """Layers compute in 16 bits, and the sum that passes from one to the next stays in 32."""
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    stage = PipelineStageInfo(0, 2)
    model = CATALOGUE["qwen3 moe"].build(False, stage)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    parallelize_decoder(context, model, stage, mp_policy=policy)
    ids = tokens()
    dtypes: list[torch.dtype] = []
    model.decoder_layers[0].self_attn.register_forward_hook(lambda _, args, output: dtypes.append(output.dtype))
    transfer = model(SequenceInput(input_ids=ids), sequence_of(ids))
    spec = model.stage_transfer_spec(SequenceInput(input_ids=ids), StageBoundary.outgoing)
    assert transfer.hidden_states.dtype == spec.hidden_states.dtype == torch.float32
    assert dtypes == [torch.bfloat16]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", MOE)
def test_experts_that_ranks_share_in_mixed_precision(name: str):
    """FSDP knows nothing of them: they keep 32 bits, and compute in the 16 of their tokens."""
    context = DeviceMeshParameters(data_parallel_shard=2, expert_parallel=2).build()
    split, single = causal_lm(name, False).float(), causal_lm(name, False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    parallelize_decoder(context, split, WHOLE, mp_policy=policy)
    dtypes: list[torch.dtype] = []
    experts = split.backbone.decoder_layers[1].mlp.grouped_experts
    experts.register_forward_hook(lambda _, args, output: dtypes.append(output.dtype))
    ids = tokens(seed=context.dp_rank)
    losses = losses_of(split, ids)
    losses.sum().backward()
    assert dtypes == [torch.bfloat16]
    # Weights of 8 bits; some tokens choose other experts.
    assert losses.mean().item() == pytest.approx(losses_of(single, ids).mean().item(), rel=0.02)
    assert experts.up_proj.weight.dtype == experts.up_proj.weight.grad.dtype == torch.float32
