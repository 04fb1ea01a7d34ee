"""The mixture-of-experts layer. Axes: N tokens, H hidden size, E experts, K experts of a token."""

import torch
from torch import nn
from torch.distributed import ProcessGroup

from d9d.module.base import ModuleLateInit

from .all_to_all import AllToAllCommunicationHandler
from .communications import ExpertCommunicationHandler, NoCommunicationHandler
from .experts import GroupedSwiGLU
from .grouped_mm import AnyGroupedMmBackendConfig
from .router import TopKRouter
from .router_loss import RouterLosses, RouterLossParameters
from .routing import RoutingParameters
from .shared import SharedExpertParameters, SharedSwiGLU


class MoELayer(nn.Module, ModuleLateInit):
    """Sends each token to K of E experts and sums their outputs, weighted by the router; maybe with a shared expert.

    Counts how many of its tokens went to each expert in `tokens_per_expert` (``(E,)``, int64), until `reset_stats`, without
    those that a mask leaves out. Layers that are computed again for their backward pass count once.

    Args:
        hidden_dim: H.
        intermediate_dim_grouped: Width between the projections of an expert.
        num_grouped_experts: E.
        top_k: K.
        router_renormalize_probabilities: Whether the K probabilities of a token are divided by their sum.
        shared_expert: The expert for all tokens; None for none.
        grouped_mm_backend: Implementation of the experts' products; by default see `build_grouped_mm_backend`.
        enable_expert_bias: Whether the router has a bias for load balancing, see `TopKRouter`.
        routing: How the router scores and chooses experts, see `TopKRouter`.

    Raises:
        ValueError: If K is not between 1 and E.
    """

    tokens_per_expert: torch.Tensor

    def __init__(
        self,
        hidden_dim: int,
        intermediate_dim_grouped: int,
        num_grouped_experts: int,
        top_k: int,
        router_renormalize_probabilities: bool,
        shared_expert: SharedExpertParameters | None = None,
        grouped_mm_backend: AnyGroupedMmBackendConfig | None = None,
        *,
        enable_expert_bias: bool = False,
        routing: RoutingParameters | None = None,
    ) -> None:
        super().__init__()
        self.router = TopKRouter(
            hidden_dim,
            num_grouped_experts,
            top_k,
            router_renormalize_probabilities,
            enable_expert_bias,
            routing=routing,
        )
        self.grouped_experts = GroupedSwiGLU(
            hidden_dim, intermediate_dim_grouped, num_grouped_experts, grouped_mm_backend
        )
        self.shared_expert = None if shared_expert is None else SharedSwiGLU(hidden_dim, shared_expert)
        self._communicator: ExpertCommunicationHandler = NoCommunicationHandler(num_grouped_experts)
        self._router_losses = RouterLosses(RouterLossParameters())
        self.register_buffer("tokens_per_expert", torch.zeros(num_grouped_experts, dtype=torch.int64), persistent=False)

    @property
    def num_experts(self) -> int:
        """E, those of other ranks too."""
        return self.tokens_per_expert.shape[0]

    @property
    def context_parallel_degree(self) -> int | None:
        """Over how many ranks the sequences are cut whose loads its losses balance; None without losses. See `MixesTokens`."""
        return self._router_losses.context_parallel_degree

    def use_communicator(self, communicator: ExpertCommunicationHandler) -> None:
        """Bring tokens to experts in another way, e.g. to those of other ranks.

        Args:
            communicator: Whatever it gives as local experts must be the rows of the experts' weights.
        """
        self._communicator = communicator

    def enable_distributed_communicator(self, group: ProcessGroup) -> None:
        """Exchange tokens among the ranks of a group, each of which holds an equal part of the experts.

        From then on all ranks of the group must call the layer together, and its backward pass too.

        Args:
            group: The ranks, in the order of the experts that they hold; a group of one changes nothing.

        Raises:
            ValueError: If the group does not divide the number of experts.
        """
        if group.size() > 1:
            self.use_communicator(AllToAllCommunicationHandler(self.num_experts, group))

    def use_router_losses(self, params: RouterLossParameters, group: ProcessGroup | None = None) -> None:
        """Train the router for balanced loads or small logits too. See [Note: what router losses count for].

        The values of outputs and losses do not change. In a pipeline of the native trainer, the task must return
        ``loss_weight`` from ``build_forward_inputs``.

        Args:
            params: Coefficients and scope; both coefficients 0 takes the losses away.
            group: With the scope "microbatch", ranks over which loads are counted; see `RouterLosses`.

        Raises:
            ValueError: If there is a group with the scope "sequence".
        """
        self._router_losses = self._router_losses.with_params(params, group)

    def use_context_group(self, group: ProcessGroup) -> None:
        """Count the loads of router losses over ranks with parts of the same sequences; `parallelize_context` calls it.

        From then on all ranks of the group must call the layer together, if it has router losses.

        Args:
            group: The context-parallel ranks.
        """
        self._router_losses = self._router_losses.with_context_group(group)

    @torch.no_grad()
    def reset_stats(self) -> None:
        """Start to count tokens anew."""
        self.tokens_per_expert.zero_()

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the experts.

        Shapes:
            ``(..., H)`` to the same; mask ``(...)``.

        Args:
            hidden_states: Tokens.
            token_mask: Nonzero for the tokens that count as load, and for the losses of the router: not for padding, nor for
                microbatches without weight. None for all. Outputs do not depend on it.

        Raises:
            ValueError: If the mask has another shape than the tokens.
        """
        if token_mask is not None and token_mask.shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"token_mask has shape {tuple(token_mask.shape)}, but hidden states {tuple(hidden_states.shape)} are of "
                f"{tuple(hidden_states.shape[:-1])} tokens. Pass one value per token."
            )
        tokens = hidden_states.flatten(0, -2)  # (N, H)
        routing = self.router(tokens)
        if torch.compiler.is_compiling() or not _is_in_backward():
            self._count(routing.selected_expert_indices, token_mask)
        slots, probabilities, groups = self._communicator.dispatch(
            tokens, routing.selected_expert_indices, routing.selected_probabilities
        )
        outputs = self.grouped_experts(slots, probabilities, groups)
        result = self._communicator.combine(outputs).view_as(hidden_states)
        if self.shared_expert is not None:
            result = result + self.shared_expert(hidden_states)
        return self._router_losses.attach(result, routing, token_mask)

    @torch.no_grad()
    def _count(self, expert_indices: torch.Tensor, token_mask: torch.Tensor | None) -> None:
        ones = torch.ones_like(expert_indices)
        counts = ones if token_mask is None else ones * (token_mask != 0).view(-1, 1)
        self.tokens_per_expert.scatter_add_(0, expert_indices.flatten(), counts.flatten())

    def reset_parameters(self) -> None:
        """Initialise the router and all experts, and the counts to zero."""
        self.router.reset_parameters()
        self.grouped_experts.reset_parameters()
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()
        self.reset_stats()


def _is_in_backward() -> bool:
    """Tell whether autograd is running, so that a forward pass is the recomputation of a checkpointed one."""
    # As `torch.utils.checkpoint` itself asks; torch has no public name for it (2.11 to 2.14).
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
