"""Rows of tokens to rows of their experts and back, by masks of which token goes to which expert.

Tokens may have different numbers of experts. Where all have the same, the layers of `d9d.module.block.moe` sort by ids.

Axes: N tokens, E experts, K experts of a token, S slots (pairs of a token and one of its experts), H hidden size.
"""

import torch
import torch.nn.functional as F

from d9d.kernel.precision import at_least_fp32


def fused_indices_to_multihot(
    indices: torch.Tensor, probs_indices: torch.Tensor, num_of_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn lists of experts into masks over all experts. Probabilities have gradients.

    Shapes:
        Two of ``(N, K)`` to two of ``(N, E)``: a mask of booleans, and probabilities, zero where the mask is not set.

    Args:
        indices: Experts of each token, each at most once; -1 for none.
        probs_indices: Their probabilities. Those of no expert count for nothing.
        num_of_local_experts: E.
    """
    columns = indices.long() + 1  # the first one takes what belongs to no expert
    wide = (indices.shape[0], num_of_local_experts + 1)
    mask = torch.zeros(wide, dtype=torch.bool, device=indices.device).scatter(1, columns, True)
    probs = probs_indices.new_zeros(wide).scatter(1, columns, probs_indices)
    return mask[:, 1:], probs[:, 1:]


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy each token to its experts: slots in the order of experts, tokens in their order within each.

    Shapes:
        Tokens ``(N, H)``, probabilities and mask ``(N, E)``; results: slots ``(S, H)``, their probabilities ``(S,)``,
        and ``(N, E)``: the row of each slot, -1 for none, as `moe_unpermute_mask` takes it.

    Args:
        inp: Tokens.
        probs: Probability of each expert.
        routing_map: Which experts each token goes to: booleans, or integers that are 0 or 1.
        num_out_tokens: S, if it is known; otherwise the host waits for it. Slots beyond it are dropped, in the order of
            rows; where there are fewer, rows of zeros follow.
    """
    by_expert = routing_map.T.bool().contiguous()  # (E, N)
    num_slots = int(by_expert.sum()) if num_out_tokens < 0 else num_out_tokens
    if inp.shape[0] == 0:  # rows without a token to take them from, which gradients pass all the same
        padding = (0, num_slots)
        return F.pad(inp, (0, 0, *padding)), F.pad(probs.flatten(), padding), routing_map.long()
    rows = by_expert.flatten().cumsum(0).view_as(by_expert) - 1
    row_id_map = rows.where(by_expert & (rows < num_slots), -1).T.contiguous()  # (N, E)
    places = torch.nonzero_static(by_expert.flatten(), size=num_slots, fill_value=-1).squeeze(1)  # (S,)
    experts, tokens = (places // inp.shape[0]).clamp(min=0), places % inp.shape[0]
    is_empty = places < 0
    slots = inp.index_select(0, tokens).masked_fill(is_empty.unsqueeze(1), 0)
    return slots, probs[tokens, experts].masked_fill(is_empty, 0), row_id_map


def moe_unpermute_mask(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
) -> torch.Tensor:
    """Sum the slots of each token. Sums of 16 bits are taken in fp32 and rounded once.

    On accelerators the order of a sum is fixed only under `torch.use_deterministic_algorithms`.

    Shapes:
        Slots ``(S, H)`` and rows ``(N, E)`` to ``(N, H)``.

    Args:
        inp: Slots, in the order of `moe_permute_with_probs`.
        row_id_map: As returned there.
        merging_probs: Weight of each slot in the sum, ``(N, E)``; by default one.
        restore_shape: ``(N, H)``, for checks.

    Raises:
        ValueError: If `restore_shape` is another shape.
    """
    num_tokens, num_experts = row_id_map.shape
    shape = torch.Size((num_tokens, *inp.shape[1:]))
    if restore_shape is not None and torch.Size(restore_shape) != shape:
        raise ValueError(
            f"restore_shape is {tuple(restore_shape)}, but {tuple(row_id_map.shape)} rows of slots "
            f"{tuple(inp.shape)} give {tuple(shape)}."
        )
    rows = row_id_map.flatten()
    # One row more takes what was dropped, and one token more the rows of no token.
    places = torch.full((inp.shape[0] + 1,), len(rows), device=inp.device)
    places[rows.where(rows >= 0, inp.shape[0])] = torch.arange(len(rows), device=inp.device)
    places = places[:-1]  # (S,), as token * E + expert
    wide = at_least_fp32(inp)
    if merging_probs is not None:
        wide = wide * F.pad(at_least_fp32(merging_probs).flatten(), (0, 1))[places].unsqueeze(1)
    sums = wide.new_zeros((num_tokens + 1, *shape[1:])).index_add(0, places // num_experts, wide)
    return sums[:-1].to(inp.dtype)
