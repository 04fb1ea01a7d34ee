"""Split the blocks of a model over tensor-parallel ranks, with torch's styles for their layers.

Axes: B batch, T tokens, H hidden size, R tensor-parallel ranks, Hq query heads, Hk key and value heads.

[Note: activations between split blocks]
Between blocks there are plain tensors: the whole ``(B, T, H)``, equal on all ranks, or with sequence parallelism this
rank's part of the tokens, ``(B, T / R, H)``. A block takes its input in as one DTensor, from which all of its first
layers compute. So their gradients are added as partial sums, and there is one collective per block and direction: an
all-reduce, or an all-gather before and a reduce-scatter after.

Source: "Reducing Activation Recomputation in Large Transformer Models", https://arxiv.org/abs/2205.05198
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement

from d9d.module.block.attention import GroupedQueryAttention, LowRankProjection, MultiHeadLatentAttention
from d9d.module.block.attention.sdpa.parameters import AttentionSinks
from d9d.module.block.embedding import SplitTokenEmbeddings
from d9d.module.block.ffn import SwiGLU
from d9d.module.block.head import ClassificationHead, EmbeddingHead, SplitLanguageModellingHead
from d9d.module.block.moe import MoELayer
from d9d.module.block.normalization import RMSNorm
from d9d.module.parallelism.style import ReplicatedHeadsParallel, ReplicatedParallel, SinksParallel
from d9d.module.parallelism.tensor import parallelize_tensor

_TOKENS_DIM = 1
_HEADS_DIM = 2
"""Of states of heads, ``(B, T, heads, D)``, as norms see them."""


def parallelize_tensor_ffn(module: SwiGLU, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Split a feed-forward network by its width, which may be uneven, in place.

    Args:
        module: Network to change; on the meta device or with values, equal on all ranks of the mesh.
        mesh: Mesh with one dimension, such as the ``tp`` dimension of a domain.
        sequence_parallel: Whether ranks have parts of the tokens; see [Note: activations between split blocks].
    """
    layout = _layout(sequence_parallel)
    # A plain tensor says nothing of its peers' sizes, so torch would take all of them to be equal.
    is_even = module.down_proj.in_features % mesh.size() == 0
    for projection in (module.gate_proj, module.up_proj):
        parallelize_tensor(projection, ColwiseParallel(use_local_output=is_even), mesh)
    parallelize_tensor(module.down_proj, RowwiseParallel(output_layouts=layout), mesh)
    _take_in(module, "x", mesh, layout)


def parallelize_tensor_attention(
    module: GroupedQueryAttention,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = False,
    replicate_kv_heads: bool = False,
) -> None:
    """Split attention by its heads, in place.

    With more ranks than key and value heads, each rank holds the projections of all of them and keeps the head that its
    queries share, if asked. Position embeddings and masks are those of all tokens on every rank; a mask with an axis of
    heads too.

    Args:
        module: Attention to change; on the meta device or with values, equal on all ranks of the mesh.
        mesh: Mesh with one dimension, such as the ``tp`` dimension of a domain.
        sequence_parallel: Whether ranks have parts of the tokens; see [Note: activations between split blocks].
        replicate_kv_heads: Whether there may be more ranks than key and value heads.

    Raises:
        ValueError: If heads can not be shared evenly by the ranks.
    """
    num_heads = module.q_proj.out_features // module.head_dim
    num_kv_heads = module.k_proj.out_features // module.head_dim
    check_tensor_parallel_heads(num_heads, num_kv_heads, mesh.size(), replicate_kv_heads=replicate_kv_heads)
    layout = _layout(sequence_parallel)
    for projection in (module.q_proj, module.gate_proj):
        if projection is not None:
            parallelize_tensor(projection, ColwiseParallel(), mesh)
    for projection in (module.k_proj, module.v_proj):
        is_split = num_kv_heads % mesh.size() == 0
        style = ColwiseParallel() if is_split else ReplicatedHeadsParallel(num_kv_heads)
        parallelize_tensor(projection, style, mesh)
    for norm in (module.q_norm, module.k_norm):
        if norm is not None:
            # Each rank sees its own heads: the gradient of the weight is a partial sum.
            parallelize_tensor(norm, SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True), mesh)
    for child in module.modules():
        if isinstance(child, AttentionSinks):
            parallelize_tensor(child, SinksParallel(), mesh)
    parallelize_tensor(module.o_proj, RowwiseParallel(output_layouts=layout), mesh)
    _take_in(module, "hidden_states", mesh, layout)
    _keep_own_heads_of_masks(module, mesh, num_heads)


def parallelize_tensor_latent_attention(
    module: MultiHeadLatentAttention, mesh: DeviceMesh, *, sequence_parallel: bool = False
) -> None:
    """Split multi-head latent attention by its heads, in place.

    What all heads share stays whole on each rank: the projections to latent vectors, and norms in between. Gradients of these
    are sums over the ranks.

    Args:
        module: Attention to change; on the meta device or with values, equal on all ranks of the mesh.
        mesh: Mesh with one dimension, such as the ``tp`` dimension of a domain.
        sequence_parallel: Whether ranks have parts of the tokens; see [Note: activations between split blocks].

    Raises:
        ValueError: If heads can not be shared evenly by the ranks.
    """
    check_tensor_parallel_heads(module.num_heads, module.num_heads, mesh.size())
    layout = _layout(sequence_parallel)
    shared: list[nn.Module] = [module.kv_down_proj, module.kv_norm]
    of_heads: list[nn.Module] = [module.kv_up_proj]
    if isinstance(module.q_proj, LowRankProjection):
        shared += [module.q_proj.down_proj, module.q_proj.norm]
        of_heads.append(module.q_proj.up_proj)
    else:
        of_heads.append(module.q_proj)
    for part in shared:
        parallelize_tensor(part, ReplicatedParallel(), mesh)
    for projection in of_heads:
        parallelize_tensor(projection, ColwiseParallel(), mesh)
    parallelize_tensor(module.o_proj, RowwiseParallel(output_layouts=layout), mesh)
    _take_in(module, "hidden_states", mesh, layout)
    _keep_own_heads_of_masks(module, mesh, module.num_heads)

    def take_out_key(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # The one key of all heads comes from a shared projection; each rank has the gradient by its own heads.
        queries, key, *angles = args
        return queries, key.to_local(grad_placements=[Partial()]), *angles

    module.rope.register_forward_pre_hook(take_out_key)


def parallelize_tensor_moe(module: MoELayer, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Split the shared expert of a layer by its width, and give its router and other experts all tokens, in place.

    Ranks of the mesh compute the same for experts that are not shared: to have less work on each, distribute these with
    `parallelize_expert_parallel`.

    Args:
        module: Layer to change; on the meta device or with values, equal on all ranks of the mesh.
        mesh: Mesh with one dimension, such as the ``tp`` dimension of a domain.
        sequence_parallel: Whether ranks have parts of the tokens; see [Note: activations between split blocks].
    """
    if module.shared_expert is not None:
        parallelize_tensor_ffn(module.shared_expert.mlp, mesh)
    if sequence_parallel:
        _gather_tokens(module, mesh)
        _cut_output(module, mesh)


def parallelize_tensor_embedding(
    module: SplitTokenEmbeddings, mesh: DeviceMesh, *, sequence_parallel: bool = False
) -> None:
    """Split embeddings by the rows of each vocabulary, which may be uneven, in place. Every rank gets all ids.

    To have a head share the weights, split both and then let the head's layers have the embeddings' parameters.

    Args:
        module: Embeddings to change; on the meta device or with values, equal on all ranks of the mesh.
        mesh: Mesh with one dimension, such as the ``tp`` dimension of a domain.
        sequence_parallel: Whether ranks get parts of the tokens; see [Note: activations between split blocks]. Then
            calls with a number of tokens that the ranks do not divide raise a ValueError.
    """
    tables = list(module.token_embedding.values())
    _refuse_foreign_ids(module, sum(table.num_embeddings for table in tables if isinstance(table, nn.Embedding)))
    # Vectors of several vocabularies are chosen by all ids, so they are cut afterwards.
    is_cut_at_once = sequence_parallel and len(tables) == 1
    for table in tables:
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=_layout(is_cut_at_once))
        parallelize_tensor(table, style, mesh)
    if sequence_parallel:
        _refuse_uneven_tokens(module, mesh)
        if not is_cut_at_once:
            _cut_output(module, mesh)


def _refuse_foreign_ids(module: SplitTokenEmbeddings, num_embeddings: int) -> None:
    """Check ids before each rank masks those of the others: one that no rank has would silently become zeros."""

    def check(_: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        is_known = ((ids >= 0) & (ids < num_embeddings)).all()
        if ids.device.type != "cpu":
            torch._assert_async(is_known)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]  # does not wait for the device
        elif not is_known:
            raise IndexError(
                f"ids from {ids.min()} to {ids.max()}, but the vocabularies have {num_embeddings} tokens together."
            )

    module.register_forward_pre_hook(check, with_kwargs=True)


def parallelize_tensor_head(
    module: SplitLanguageModellingHead, mesh: DeviceMesh, *, sequence_parallel: bool = False
) -> None:
    """Split a language modelling head by the rows of each vocabulary, which may be uneven, in place.

    Ranks never see logits of other ranks: of each token, three numbers go around (see [Note: Parts of the vocabulary on
    several ranks]). Every rank gets the labels, and the losses, of all tokens. ``logits`` gathers whole logits.

    Args:
        module: Head to change; on the meta device or with values, equal on all ranks of the mesh.
        mesh: Mesh with one dimension, such as the ``tp`` dimension of a domain.
        sequence_parallel: Whether ranks have parts of the tokens; see [Note: activations between split blocks].
    """
    layout = _layout(sequence_parallel)
    for projection in module.lm_head.children():
        # The style's own hooks serve `logits`; the loss reads the weights.
        parallelize_tensor(projection, ColwiseParallel(input_layouts=layout, output_layouts=Replicate()), mesh)
    _take_in(module, "hidden_states", mesh, layout, is_local=True)


def parallelize_tensor_pooling_head(module: ClassificationHead | EmbeddingHead, mesh: DeviceMesh) -> None:
    """Give a head all tokens of which ranks have parts, in place: for sequence parallelism only. Ranks compute the same.

    Args:
        module: Head to change.
        mesh: Mesh with one dimension, such as the ``tp`` dimension of a domain.
    """
    _gather_tokens(module, mesh)


def parallelize_tensor_norm(module: RMSNorm, mesh: DeviceMesh) -> None:
    """Let a norm between blocks see this rank's part of the tokens, in place: for sequence parallelism only.

    Its weight stays whole, and its gradient is summed over the ranks. Without sequence parallelism, where all ranks
    compute the same, a norm needs nothing.

    Args:
        module: Norm to change; on the meta device or with values, equal on all ranks of the mesh.
        mesh: Mesh with one dimension, such as the ``tp`` dimension of a domain.
    """
    parallelize_tensor(module, SequenceParallel(sequence_dim=_TOKENS_DIM, use_local_output=True), mesh)


def check_tensor_parallel_heads(
    num_heads: int, num_kv_heads: int, degree: int, *, replicate_kv_heads: bool = False
) -> None:
    """Refuse a number of ranks that can not share the heads of an attention layer evenly.

    Needs no process group: for checks of a config.

    Args:
        num_heads: Hq.
        num_kv_heads: Hk.
        degree: R.
        replicate_kv_heads: Whether several ranks may hold the same key and value head.

    Raises:
        ValueError: With the degrees that can.
    """

    def is_valid(ranks: int, *, replicates: bool) -> bool:
        return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or (replicates and ranks % num_kv_heads == 0))

    if is_valid(degree, replicates=replicate_kv_heads):
        return
    valid = [str(ranks) for ranks in range(1, num_heads + 1) if is_valid(ranks, replicates=replicate_kv_heads)]
    hint = ", or pass replicate_kv_heads=True" if is_valid(degree, replicates=True) else ""
    raise ValueError(
        f"{num_heads} query heads and {num_kv_heads} key and value heads can not be shared evenly by tensor_parallel = "
        f"{degree} ranks. Set tensor_parallel to one of {', '.join(valid)}{hint}."
    )


def _layout(sequence_parallel: bool) -> Placement:
    return Shard(_TOKENS_DIM) if sequence_parallel else Replicate()


def _gather_tokens(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give a module that ranks compute alike all tokens; of their gradient, which is the same, each keeps its part."""

    def before_call(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        own, *rest = args
        distributed = DTensor.from_local(own, mesh, [Shard(_TOKENS_DIM)], run_check=False)
        return distributed.redistribute(placements=[Replicate()]).to_local(), *rest

    module.register_forward_pre_hook(before_call)


def _take_in(module: nn.Module, name: str, mesh: DeviceMesh, layout: Placement, *, is_local: bool = False) -> None:
    """Turn the first argument of each call into a DTensor of all tokens, or its local tensor with a partial gradient."""

    def whole(states: torch.Tensor) -> torch.Tensor:
        # A function, since a copy of the module must not copy the mesh.
        distributed = DTensor.from_local(states, mesh, [layout], run_check=False).redistribute(placements=[Replicate()])
        return distributed.to_local(grad_placements=[Partial()]) if is_local else distributed

    def before_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (whole(args[0]), *args[1:]), kwargs
        return args, {**kwargs, name: whole(kwargs[name])}

    module.register_forward_pre_hook(before_call, with_kwargs=True)


def _keep_own_heads_of_masks(module: nn.Module, mesh: DeviceMesh, num_heads: int) -> None:
    """Cut masks that differ by head: with one head left they would broadcast, and something else be computed."""
    num_own = num_heads // mesh.size()
    first = mesh.get_local_rank() * num_own

    def own(mask: torch.Tensor | None) -> torch.Tensor | None:
        if mask is None or mask.ndim != 4 or mask.shape[1] != num_heads:
            return mask
        return mask[:, first : first + num_own]

    def before_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if len(args) > 1:
            return (args[0], own(args[1]), *args[2:]), kwargs
        return args, {**kwargs, "attention_mask": own(kwargs["attention_mask"])}

    module.register_forward_pre_hook(before_call, with_kwargs=True)


def _refuse_uneven_tokens(module: nn.Module, mesh: DeviceMesh) -> None:
    def before_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids: torch.Tensor = args[0] if args else kwargs["input_ids"]
        num_tokens, degree = ids.shape[_TOKENS_DIM], mesh.size()
        if num_tokens % degree:
            raise ValueError(
                f"sequence parallelism cuts {num_tokens} tokens into {degree} equal parts. Pad sequences to a multiple "
                f"of {degree}, such as {num_tokens + -num_tokens % degree}."
            )

    module.register_forward_pre_hook(before_call, with_kwargs=True)


def _cut_output(module: nn.Module, mesh: DeviceMesh) -> None:
    def after_call(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        distributed = DTensor.from_local(output, mesh, [Replicate()], run_check=False)
        return distributed.redistribute(placements=[Shard(_TOKENS_DIM)]).to_local()

    module.register_forward_hook(after_call)
