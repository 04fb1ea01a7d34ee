"""Split sequences over ranks: each computes with its own tokens, and attention sees those of all.

[Note: what context parallelism changes]
Everything but attention treats tokens one by one, so it needs no change: a rank computes with its part, at the true
positions. Its gradients of weights are those of its part, and are summed over context-parallel ranks as over
data-parallel ones, by the gradient manager and FSDP: the domains count both among the ranks with different data.

[Note: a group for attention]
Keys travel in the middle of forward and backward passes, while gradients are summed in buckets whose start depends on
what a rank has used. So the exchange has process groups of its own (``mesh_for(BATCH_DOMAIN)["cp"]``): operations of one
group must start in one order on all ranks.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from d9d.core.protocol import MixesTokens
from d9d.module.block.attention.linear import GatedDeltaNet
from d9d.module.block.attention.sdpa.eager import EagerSdpaBackend
from d9d.module.block.attention.sdpa.parameters import AttentionSinks, combine_masks, num_groups
from d9d.module.block.attention.sdpa.torch_kernels import TorchSdpaBackend
from d9d.module.block.head import TokenMean
from d9d.module.block.moe import MoELayer
from d9d.module.parallelism.context_attention import ContextAttention, context_attention
from d9d.module.parallelism.key_value_exchange import ContextParallelMethod, KeysValues, build_key_value_exchange
from d9d.module.parallelism.sequence_sharding import SequenceOrder, SequenceSharding

__all__ = ["ContextParallelSdpa", "parallelize_context"]


def parallelize_context(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    method: ContextParallelMethod | str = ContextParallelMethod.ring,
    order: SequenceOrder | str = SequenceOrder.zigzag,
) -> None:
    """Let the attention of a module see the tokens of all ranks, while each rank calls it with its part, in place.

    See [Note: what context parallelism changes]. `SequenceSharding` cuts batches in the same order. All ranks must call
    the module, and its backward pass, with parts of the same shape. Parameters stay as they are: distribute them over
    data- and context-parallel ranks with `parallelize_hsdp` or `parallelize_replicate`, before or after.

    Routers count the loads of whole sequences for their losses, and heads that pool give all ranks the means of whole
    sequences; see [Note: what router losses count for] and [Note: outputs of whole sequences].

    A mask of a call has a row per query of this rank, or one for all, and a column per key of the *whole* sequence.

    Args:
        module: An attention block, a layer or a whole model, with blocks of `d9d.module.block.attention`; or one that counts or
            averages over the tokens of a sequence, a mixture of experts or a head that pools. On the meta device or with
            values.
        mesh: Mesh with one dimension, ``mesh_for(BATCH_DOMAIN)["cp"]``. Over one rank nothing is changed.
        method: How keys and values travel.
        order: Which tokens a rank has.

    Raises:
        NotImplementedError: If the module holds linear attention, whose state passes from token to token, or attention of
            another kind than torch or eager. Nothing is changed then.
        ValueError: If the mesh has more than one dimension, or the module holds no attention, or it is split already.
    """
    sharding = SequenceSharding.over(mesh, order)
    method = ContextParallelMethod(method)
    if sharding.num_ranks == 1:
        return
    _refuse_linear_attention(module)
    _refuse_other_kernels(module)
    backends: list[tuple[nn.Module, str, EagerSdpaBackend | TorchSdpaBackend]] = []
    for owner in module.modules():
        for name, child in owner.named_children():
            if isinstance(child, ContextParallelSdpa):
                raise ValueError(
                    f"the attention of {type(owner).__name__} is split over context-parallel ranks already"
                )
            if isinstance(child, EagerSdpaBackend | TorchSdpaBackend):
                backends.append((owner, name, child))
    counting = [child for child in module.modules() if isinstance(child, TokenMean | MoELayer)]
    if not backends and not counting:
        raise ValueError(
            f"{type(module).__name__} holds no attention of d9d.module.block.attention, so its tokens would see those of "
            "this rank only. Pass a module that holds attention blocks; a stage without layers needs no call."
        )
    for owner, name, backend in backends:
        owner.register_module(name, ContextParallelSdpa(backend, sharding, method))
    for child in counting:
        child.use_context_group(mesh.get_group())


class ContextParallelSdpa(nn.Module):
    """Scaled dot product attention of this rank's queries to the keys of all ranks; an `SdpaBackend`.

    Tiles without masks go to a fused kernel where there is one, unless the layer asked for eager attention.

    Args:
        backend: What the layer had before, whose sinks, if any, it takes over.
        sharding: Which tokens this rank has.
        method: How keys and values travel.
    """

    def __init__(
        self, backend: EagerSdpaBackend | TorchSdpaBackend, sharding: SequenceSharding, method: ContextParallelMethod
    ) -> None:
        super().__init__()
        self._sharding = sharding
        self._method = method
        self._allows_fused = isinstance(backend, TorchSdpaBackend) and backend.may_use_flash
        self.context_parallel_degree = sharding.num_ranks
        self.window_size = backend.window_size
        self.sinks: AttentionSinks | None = backend.sinks

    def forward(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> torch.Tensor:
        """Compute attention; arguments as in `SdpaBackend`, for the tokens of this rank, but for the columns of the mask.

        Raises:
            NotImplementedError: If the mask is to be trained.
            ValueError: As in `SdpaBackend`, and if the mask is not one of this rank's queries and all keys, or the number
                of tokens is odd in zigzag order.
        """
        num_groups(query_states, key_states)
        num_own = query_states.shape[-2]
        self._check_lengths(num_own, key_states.shape[-2], attention_mask)
        device_type = query_states.device.type
        if torch.is_autocast_enabled(device_type):
            # As it does for torch's attention.
            dtype = torch.get_autocast_dtype(device_type)
            query_states, key_states, value_states = (
                states.to(dtype) for states in (query_states, key_states, value_states)
            )
        call = ContextAttention(
            sharding=self._sharding,
            exchange=build_key_value_exchange(self._method, self._sharding),
            window_size=self.window_size,
            allow_fused=self._allows_fused,
            is_causal=is_causal,
            scale=scale,
        )
        sinks = None if self.sinks is None else self.sinks(query_states.shape[-3])
        return context_attention(call, query_states, KeysValues(key_states, value_states), sinks, attention_mask)

    def _check_lengths(self, num_own: int, num_keys: int, mask: torch.Tensor | None) -> None:
        num_tokens = num_own * self._sharding.num_ranks
        if num_own != num_keys:
            raise ValueError(
                f"{num_own} queries and {num_keys} keys: under context parallelism a rank has both of its tokens."
            )
        self._sharding.check_length(num_tokens)
        combine_masks(None, mask)
        if mask is None:
            return
        if mask.requires_grad:
            raise NotImplementedError("a mask that is trained gets no gradient under context parallelism. Detach it.")
        if mask.shape[-2] not in (1, num_own) or mask.shape[-1] not in (1, num_tokens):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, but a context-parallel rank needs {num_own} rows, for its own "
                f"queries, or 1, and {num_tokens} columns, for the keys of the whole sequence. Cut the rows alone: "
                "SequenceSharding.shard(mask, dim=2)."
            )


def _refuse_linear_attention(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, GatedDeltaNet):
            raise NotImplementedError(
                f"{name or type(child).__name__} is a gated delta net: its state passes from token to token, so a rank would "
                "have to wait for all that have earlier tokens. Set the degrees of context parallelism to 1."
            )


def _refuse_other_kernels(module: nn.Module) -> None:
    """Refuse what would go on to take the tokens of a rank for whole sequences, such as kernels for whole sequences."""
    names = [
        f"{name or 'the module'} ({type(child).__name__})"
        for name, child in module.named_modules()
        if isinstance(child, MixesTokens)
        and child.context_parallel_degree == 1
        and not isinstance(child, EagerSdpaBackend | TorchSdpaBackend | TokenMean | MoELayer)
    ]
    if names:
        raise NotImplementedError(
            f"{', '.join(names)} can not see tokens of other ranks. Build the layers with the attention kind torch or eager "
            "(sdpa_backend), or set the degrees of context parallelism to 1."
        )
