"""Tiles of attention: parts of the keys, joined, equal attention to all of them, in plain and in fused kernels."""

import pytest
import torch

from d9d.kernel import attention_tile
from d9d.kernel.attention_tile import AttentionTile, attend, attend_backward, has_fused_kernel
from tests.d9d.module.block.oracles import FP64

BATCH, HEADS, KEY_HEADS, TOKENS, HEAD_DIM, SCALE = 2, 4, 2, 6, 6, 0.4
BF16 = {"rtol": 0.05, "atol": 0.05}  # both round products, weights and outputs to 2**-8, at different places
MASKS = ("none", "causal", "bool", "per head", "float")


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def states(value_dim: int = HEAD_DIM, key_heads: int = KEY_HEADS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        random(BATCH, HEADS, TOKENS, HEAD_DIM, seed=1),
        random(BATCH, key_heads, TOKENS, HEAD_DIM, seed=2),
        random(BATCH, key_heads, TOKENS, value_dim, seed=3),
    )


def mask_of(kind: str) -> torch.Tensor | None:
    square = (BATCH, 1, TOKENS, TOKENS)
    match kind:
        case "bool":
            mask = random(*square, seed=4) > -0.5
            mask[0, 0, 2] = False  # a query that sees nothing
            return mask
        case "per head":
            return random(BATCH, HEADS, TOKENS, TOKENS, seed=4) > -0.5
        case "float":
            return random(*square, seed=4)
        case _:
            return None


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp from the definition, for autograd."""
    groups = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(groups, 1).mT * SCALE
    mask = torch.ones(TOKENS, TOKENS).tril().bool() if kind == "causal" else mask_of(kind)
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask
    sees_nothing = (logits == -torch.inf).all(-1, keepdim=True)
    weights = logits.masked_fill(sees_nothing, 0.0).softmax(-1).masked_fill(sees_nothing, 0.0)
    return weights @ v.repeat_interleave(groups, 1), logits.logsumexp(-1)


def tile_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str) -> AttentionTile:
    return AttentionTile(queries=q, keys=k, values=v, scale=SCALE, is_causal=kind == "causal", mask=mask_of(kind))


@pytest.mark.parametrize("max_logits", [attention_tile._MAX_LOGITS, 2 * BATCH * HEADS * TOKENS])
@pytest.mark.parametrize("kind", MASKS)
def test_a_tile_of_all_keys(monkeypatch: pytest.MonkeyPatch, kind: str, max_logits: int):
    """Also some queries after the other."""
    monkeypatch.setattr(attention_tile, "_MAX_LOGITS", max_logits)
    leaves = [whole.requires_grad_() for whole in states(value_dim=4)]
    expected, expected_logsumexp = formula(*leaves, kind)
    grad = random(*expected.shape, seed=5)
    expected.backward(grad)
    tile = tile_of(*(leaf.detach() for leaf in leaves), kind)
    output, logsumexp = attend(tile, allow_fused=False)
    torch.testing.assert_close(output, expected.detach(), **FP64)
    torch.testing.assert_close(logsumexp, expected_logsumexp.detach(), **FP64)
    gradients = attend_backward(tile, output, logsumexp, grad, allow_fused=False)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, **FP64)


@pytest.mark.parametrize("allow_fused", [False, True])
def test_gradients_of_parts_of_the_keys_add_up(allow_fused: bool):
    leaves = [whole.requires_grad_() for whole in states()]
    output, logsumexp = formula(*leaves, "none")
    grad = random(*output.shape, seed=5)
    output.backward(grad)
    q, k, v = (leaf.detach() for leaf in leaves)
    parts = [
        AttentionTile(queries=q, keys=k[..., part, :], values=v[..., part, :], scale=SCALE)
        for part in (slice(0, 2), slice(2, 6))
    ]
    outputs = [attend(part, allow_fused=allow_fused) for part in parts]
    shares = torch.stack([sums for _, sums in outputs]).softmax(0).unsqueeze(-1)
    joined = sum(share * out for share, (out, _) in zip(shares, outputs, strict=True))
    torch.testing.assert_close(joined, output.detach(), **FP64)
    gradients = [
        attend_backward(part, output.detach(), logsumexp.detach(), grad, allow_fused=allow_fused) for part in parts
    ]
    torch.testing.assert_close(sum(gradient[0] for gradient in gradients), leaves[0].grad, **FP64)
    for index in (1, 2):
        whole = torch.cat([gradient[index] for gradient in gradients], -2)
        torch.testing.assert_close(whole, leaves[index].grad, **FP64)


def compare_kernels(device: str, dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    for value_dim, key_heads, kind in (
        (HEAD_DIM, 2, "none"),
        (4, 2, "causal"),
        (HEAD_DIM, 4, "causal"),
        (4, 1, "none"),
    ):
        tile = tile_of(*(whole.to(device, dtype) for whole in states(value_dim, key_heads)), kind)
        assert has_fused_kernel(tile)
        output, logsumexp = attend(tile, allow_fused=False)
        fused, fused_logsumexp = attend(tile)
        torch.testing.assert_close(fused, output, **tolerance)
        torch.testing.assert_close(fused_logsumexp, logsumexp, **tolerance)
        grad = random(*output.shape, seed=5).to(device, dtype)
        gradients = attend_backward(tile, output, logsumexp, grad, allow_fused=False)
        for gradient, plain in zip(attend_backward(tile, output, logsumexp, grad), gradients, strict=True):
            torch.testing.assert_close(gradient, plain, **tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, FP64), (torch.bfloat16, BF16)])
def test_the_fused_kernel_agrees(dtype: torch.dtype, tolerance: dict[str, float]):
    compare_kernels("cpu", dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_the_fused_kernel_of_the_accelerator_agrees():
    compare_kernels(torch.accelerator.current_accelerator().type, torch.bfloat16, BF16)


def test_where_no_fused_kernel_can_be_used():
    assert has_fused_kernel(tile_of(*states(), "none"))
    assert not has_fused_kernel(tile_of(*states(), "bool"))
    assert not has_fused_kernel(tile_of(*states(value_dim=HEAD_DIM + 1), "none"))
