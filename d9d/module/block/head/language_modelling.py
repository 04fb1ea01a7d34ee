"""Predict tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from d9d.kernel.cce import IGNORE_INDEX
from d9d.kernel.cut_cross_entropy import linear_cross_entropy_per_token
from d9d.module.block.embedding import INIT_STD, SplitTokenEmbeddings, check_split_order

from .base import TaskHead
from .vocabulary_rows import own_rows

LM_IGNORE_INDEX: Final = IGNORE_INDEX
"""The label of tokens that have no loss, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCausalLMHeadShared:
    """What the language modelling head needs beside hidden states."""

    labels: torch.Tensor
    """``(batch, tokens)``: the token to predict at each position (already shifted), or `LM_IGNORE_INDEX`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCausalLMOutput:
    """What the language modelling head gives."""

    cross_entropy: torch.Tensor
    """``(batch, tokens)``: the loss of each position, zero where there is no label."""


class SplitLanguageModellingHead(TaskHead[SequenceCausalLMHeadShared, SequenceCausalLMOutput]):
    """Scores tokens of several vocabularies side by side and gives the cross entropy of each label.

    Logits are never in memory as a whole (see [Note: Cut cross entropy]). Vocabularies are those of
    `SplitTokenEmbeddings`; parameters are ``lm_head.<vocabulary>.weight``, which may be tied to the embeddings.

    Args:
        split_vocab_size: Number of tokens of each vocabulary.
        split_order: Their names, in the order of ids.
        hidden_size: Size of the hidden states.

    Raises:
        ValueError: If `split_order` does not name each vocabulary once.
    """

    def __init__(self, split_vocab_size: Mapping[str, int], split_order: Sequence[str], hidden_size: int) -> None:
        super().__init__()
        check_split_order(split_vocab_size, split_order)
        self._split_order = tuple(split_order)
        self.lm_head = nn.ModuleDict(
            {name: nn.Linear(hidden_size, split_vocab_size[name], bias=False) for name in split_order}
        )
        self._is_tied = False
        self.reset_parameters()

    @property
    def is_tied(self) -> bool:
        """Whether the weights are those of embeddings, so that both must be distributed together."""
        return self._is_tied

    def tie_to(self, embeddings: SplitTokenEmbeddings) -> None:
        """Take the weights of embeddings of the same vocabularies as own ones. The embeddings initialise them, not the head.

        Args:
            embeddings: Before FSDP or replication takes their parameters; again after tensor parallelism has split both.
        """
        for name in self._split_order:
            self.lm_head[name].weight = embeddings.token_embedding[name].weight
        self._is_tied = True

    def forward(self, hidden_states: torch.Tensor, shared: SequenceCausalLMHeadShared) -> SequenceCausalLMOutput:
        """Compute the loss of each position; it is in fp32, or in fp64 for fp64 states.

        Raises:
            ValueError: If labels have another shape than the tokens.
        """
        labels = shared.labels
        if labels.shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, but hidden states {tuple(hidden_states.shape)} are of "
                f"{tuple(hidden_states.shape[:-1])} tokens. Pass one label per token, {LM_IGNORE_INDEX} for none."
            )
        rows = own_rows([self.lm_head.get_parameter(f"{name}.weight") for name in self._split_order])
        losses = linear_cross_entropy_per_token(
            hidden_states.flatten(0, -2),
            rows.weights,
            labels.flatten(),
            ignore_index=LM_IGNORE_INDEX,
            starts=rows.starts,
            group=rows.group,
        )
        return SequenceCausalLMOutput(cross_entropy=losses.view(labels.shape))

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the scores of all tokens, ``(..., hidden_size)`` to ``(..., vocabulary)``: for generation and tests."""
        return torch.cat([self.lm_head[name](hidden_states) for name in self._split_order], dim=-1)

    def reset_parameters(self) -> None:
        """Draw every weight from a normal distribution of standard deviation 0.02, but for those of embeddings."""
        for weight in () if self._is_tied else self.lm_head.parameters():
            nn.init.normal_(weight, std=INIT_STD)
