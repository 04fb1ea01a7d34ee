"""How a router scores experts, and among which it chooses. Axes: N tokens, E experts, G groups of experts."""

from enum import StrEnum

import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt

from d9d.core.config import Config


class RouterScoring(StrEnum):
    """What turns the logits of a token into the scores of experts."""

    softmax = "softmax"
    """Scores that add up to one (Qwen3, Mixtral)."""
    sigmoid = "sigmoid"
    """Each for itself (DeepSeek-V3)."""


class ExpertGroupLimit(Config):
    """Lets a token choose experts of its best groups only, so that it travels to few nodes.

    Groups are ranges of experts of equal size. One is as good as the sum of its two best scores, biases included.

    Source:
        "DeepSeek-V3", https://arxiv.org/abs/2412.19437, section 2.1.2; the two best are those of its published code.
    """

    model_config = ConfigDict(frozen=True)

    num_groups: PositiveInt
    """G."""
    num_selected_groups: PositiveInt
    """How many of them a token chooses from."""


class RoutingParameters(Config):
    """Describes what differs between routers."""

    model_config = ConfigDict(frozen=True)

    scoring: RouterScoring = RouterScoring.softmax
    """What scores are."""
    group_limit: ExpertGroupLimit | None = None
    """Which experts a token may choose; by default all."""
    scaling_factor: PositiveFloat = 1.0
    """Factor on the weights of a token's experts, after they were divided by their sum."""
    has_wide_logits: bool = False
    """Whether logits are computed in fp32 at least, with inputs and weights of 16 bits too, as in DeepSeek-V3."""


def check_group_limit(limit: ExpertGroupLimit, num_experts: int, top_k: int) -> None:
    """Refuse groups of which a token can not choose its experts.

    Raises:
        ValueError: If groups are not of equal size, or of one expert, or those that are chosen have too few experts.
    """
    size, rest = divmod(num_experts, limit.num_groups)
    if rest or size < 2:
        valid = [groups for groups in range(1, num_experts // 2 + 1) if num_experts % groups == 0]
        raise ValueError(
            f"{num_experts} experts can not be cut into {limit.num_groups} equal groups of two or more. Set num_groups to one "
            f"of {valid}."
        )
    if limit.num_selected_groups > limit.num_groups or limit.num_selected_groups * size < top_k:
        raise ValueError(
            f"a token can not choose {top_k} experts from {limit.num_selected_groups} of {limit.num_groups} groups of {size}. "
            f"Set num_selected_groups between {-(-top_k // size)} and {limit.num_groups}."
        )


def score_experts(logits: torch.Tensor, scoring: RouterScoring) -> torch.Tensor:
    """Return the scores of all experts, in fp32 at least: ``(N, E)`` to the same."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    match scoring:
        case RouterScoring.softmax:
            return logits.softmax(-1, dtype=dtype)
        case RouterScoring.sigmoid:
            return logits.to(dtype).sigmoid()


def limit_to_groups(scores: torch.Tensor, limit: ExpertGroupLimit) -> torch.Tensor:
    """Return scores that are minus infinity outside of the best groups of each token: ``(N, E)`` to the same."""
    grouped = scores.unflatten(-1, (limit.num_groups, -1))  # (N, G, E / G)
    of_groups = grouped.topk(2, dim=-1).values.sum(-1)  # (N, G)
    chosen = of_groups.topk(limit.num_selected_groups, dim=-1).indices
    is_left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, chosen, False)
    return grouped.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(-2)
