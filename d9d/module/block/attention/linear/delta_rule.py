"""The gated delta rule, in chunks.

[Note: Chunked delta rule]

Each head has a state S, a matrix that maps keys to values. A token makes it forget by a factor a_t, looks up its key,
and writes a part b_t of what is missing to its value:

    S_t = a_t S_(t-1) + k_t^T u_t,   u_t = b_t (v_t - a_t k_t S_(t-1)),   o_t = q_t S_t

With c_t = a_1 ... a_t within a chunk that starts from S_0, this is S_t = c_t S_0 + sum_(j <= t) c_t / c_j k_j^T u_j, so
the writes of a chunk solve a triangular system

    u_t + sum_(j < t) b_t c_t / c_j (k_t . k_j) u_j = b_t v_t - b_t c_t k_t S_0

whose solution is linear in S_0: U = U_v - U_k S_0, where both parts are computed for all chunks at once. What is left is
one short step per chunk: outputs, and the next state.

Source: "Gated Delta Networks", https://arxiv.org/abs/2412.06464, section 3.3.

Axes: B batch, H heads, T tokens, N chunks, C tokens of a chunk, K dimensions of keys, V of values.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias, assert_never

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field

from d9d.core.config import Config
from d9d.kernel.optional import import_kernel
from d9d.kernel.precision import at_least_fp32

CHUNK_SIZE: Final = 64
"""Tokens that are solved for together: more means larger matrix products, but also more of them."""


class ChunkedDeltaRuleConfig(Config):
    """Plain tensor operations in chunks: runs anywhere, in any dtype."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["chunked"] = "chunked"


class FlaDeltaRuleConfig(Config):
    """The kernels of the package flash-linear-attention."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["fla"] = "fla"


AnyDeltaRuleConfig: TypeAlias = Annotated[ChunkedDeltaRuleConfig | FlaDeltaRuleConfig, Field(discriminator="kind")]
"""One implementation of the gated delta rule."""


class GatedDeltaRule(Protocol):
    """The gated delta rule."""

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        log_decays: torch.Tensor,
        strengths: torch.Tensor,
    ) -> torch.Tensor:
        """Return what queries read from the state; arguments and shapes as of `chunked_gated_delta_rule`."""
        ...


def build_delta_rule(config: AnyDeltaRuleConfig | None) -> GatedDeltaRule:
    """Build an implementation of the gated delta rule.

    Args:
        config: Which one; None for that which runs anywhere.

    Raises:
        ImportError: If it needs a package that is not installed.
    """
    match config:
        case None | ChunkedDeltaRuleConfig():
            return chunked_gated_delta_rule
        case FlaDeltaRuleConfig():
            return FlaDeltaRule()
        case _:
            assert_never(config)


class FlaDeltaRule:
    """Calls `fla.ops.gated_delta_rule.chunk_gated_delta_rule`.

    Raises:
        ImportError: If the package is not installed.
    """

    def __init__(self) -> None:
        kernels = import_kernel(
            "the delta rule kind fla", "fla.ops.gated_delta_rule", "flash-linear-attention", "chunked"
        )
        # Any: the package has no types.
        self._kernel: Callable[..., Any] = kernels.chunk_gated_delta_rule

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        log_decays: torch.Tensor,
        strengths: torch.Tensor,
    ) -> torch.Tensor:
        """Return what queries read from the state; arguments and shapes as of `chunked_gated_delta_rule`."""
        # The kernel wants all three in one dtype, and logs of decays, which it sums, in fp32.
        q, k, v = (states.transpose(1, 2).to(values.dtype) for states in (queries, keys, values))  # (B, T, H, K or V)
        outputs, _ = self._kernel(
            q, k, v, log_decays.transpose(1, 2), strengths.transpose(1, 2).to(values.dtype), scale=1.0
        )
        return outputs.transpose(1, 2)


def chunked_gated_delta_rule(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_decays: torch.Tensor,
    strengths: torch.Tensor,
    chunk_size: int = CHUNK_SIZE,
) -> torch.Tensor:
    """Return what queries read from the state, which starts empty. See [Note: Chunked delta rule].

    Shapes:
        Queries and keys ``(B, H, T, K)``, values ``(B, H, T, V)``, decays and strengths ``(B, H, T)``; result
        ``(B, H, T, V)``, in the dtype of the values. Inside, fp32 at least.

    Args:
        queries: Queries, with whatever scale they are to have.
        keys: Keys; of length one at most, else the state can grow without bounds.
        values: Values.
        log_decays: Logs of the factors by which the state is multiplied; at most zero.
        strengths: Which part of a value's difference is written, from zero to one.
        chunk_size: C.
    """
    dtype, num_tokens = values.dtype, values.shape[-2]
    if num_tokens == 0:
        return torch.zeros_like(values)
    # Padding neither decays nor writes.
    padding = -num_tokens % chunk_size
    q, k, v = (
        F.pad(at_least_fp32(tensor), (0, 0, 0, padding)).unflatten(-2, (-1, chunk_size))  # (B, H, N, C, K or V)
        for tensor in (queries, keys, values)
    )
    log_a, b = (
        F.pad(at_least_fp32(tensor), (0, padding)).unflatten(-1, (-1, chunk_size))  # (B, H, N, C)
        for tensor in (log_decays, strengths)
    )
    log_c = log_a.cumsum(-1)
    # Masked before the exponential, which may overflow above the diagonal.
    is_later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=values.device).triu(1)
    ratios = (
        (log_c.unsqueeze(-1) - log_c.unsqueeze(-2)).masked_fill(is_later, -torch.inf).exp()
    )  # c_t / c_j: (.., C, C)
    c = log_c.exp().unsqueeze(-1)  # (B, H, N, C, 1)
    written = b.unsqueeze(-1)
    # The solver takes the diagonal for ones and does not look above it.
    system = written * ratios * (k @ k.mT)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((written * v, written * c * k), -1), upper=False, unitriangular=True
    )
    u_of_values, u_of_keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    outputs = _scan_chunks(
        queries_of_state=q * c,
        weights=(q @ k.mT) * ratios,
        u_of_values=u_of_values,
        u_of_keys=u_of_keys,
        keys_to_end=k * ratios[..., -1, :].unsqueeze(-1),
        decay_to_end=c[..., -1:, :],
    )
    return outputs.flatten(-3, -2)[..., :num_tokens, :].to(dtype)


def _scan_chunks(
    *,
    queries_of_state: torch.Tensor,
    weights: torch.Tensor,
    u_of_values: torch.Tensor,
    u_of_keys: torch.Tensor,
    keys_to_end: torch.Tensor,
    decay_to_end: torch.Tensor,
) -> torch.Tensor:
    """Carry the state from chunk to chunk; all arguments are ``(B, H, N, ...)``, the result ``(B, H, N, C, V)``."""
    batch, heads, num_chunks, _, key_dim = keys_to_end.shape
    state = u_of_values.new_zeros(batch, heads, key_dim, u_of_values.shape[-1])
    outputs: list[torch.Tensor] = []
    for n in range(num_chunks):
        u = u_of_values[:, :, n] - u_of_keys[:, :, n] @ state  # (B, H, C, V)
        outputs.append(queries_of_state[:, :, n] @ state + weights[:, :, n] @ u)
        state = decay_to_end[:, :, n] * state + keys_to_end[:, :, n].mT @ u
    return torch.stack(outputs, dim=2)
