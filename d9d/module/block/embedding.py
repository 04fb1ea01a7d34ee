"""Look up the vectors of tokens."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from d9d.module.base import ModuleLateInit

INIT_STD: Final = 0.02
"""Standard deviation of new token vectors, as in GPT-2 and most models since."""


def check_split_order(split_vocab_size: Mapping[str, int], split_order: Sequence[str]) -> None:
    """Refuse an order of vocabularies that is not a permutation of their names.

    Raises:
        ValueError: If a name is missing, unknown or named twice, there is none, or a vocabulary is empty.
    """
    if not split_vocab_size or sorted(split_vocab_size) != sorted(split_order):
        raise ValueError(
            f"split_order {list(split_order)} must name each vocabulary of split_vocab_size "
            f"{sorted(split_vocab_size)} exactly once, and there must be one."
        )
    empty = sorted(name for name, size in split_vocab_size.items() if size <= 0)
    if empty:
        raise ValueError(f"split_vocab_size has no tokens for {empty}. Give each a positive number, or leave it out.")


class SplitTokenEmbeddings(nn.Module, ModuleLateInit):
    """Embeddings of several vocabularies side by side, each with a parameter of its own.

    Ids count through the vocabularies in their order: with sizes 100 and 10, ids 100 to 109 are of the second. So added
    tokens can be trained while the others stay as they are. Parameters are ``token_embedding.<vocabulary>.weight``.

    Args:
        split_vocab_size: Number of tokens of each vocabulary.
        split_order: Their names, in the order of ids.
        hidden_size: Size of a token's vector.

    Raises:
        ValueError: If `split_order` does not name each vocabulary once.
    """

    def __init__(self, split_vocab_size: Mapping[str, int], split_order: Sequence[str], hidden_size: int) -> None:
        super().__init__()
        check_split_order(split_vocab_size, split_order)
        sizes = [split_vocab_size[name] for name in split_order]
        self._split_order = tuple(split_order)
        self._starts = tuple(itertools.accumulate(sizes[:-1], initial=0))
        self.token_embedding = nn.ModuleDict(
            {name: nn.Embedding(split_vocab_size[name], hidden_size) for name in split_order}
        )
        self.reset_parameters()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors of tokens.

        Shapes:
            ``(...)`` integers to ``(..., hidden_size)``.

        Raises:
            IndexError: On CPU, if an id is outside all vocabularies; on an accelerator its own assertion fails.
        """
        tables = [self.token_embedding[name] for name in self._split_order]
        result = tables[0](self._local_ids(input_ids, 0))
        for index in range(1, len(tables)):
            vectors = tables[index](self._local_ids(input_ids, index))
            result = torch.where((input_ids >= self._starts[index]).unsqueeze(-1), vectors, result)
        return result

    def _local_ids(self, input_ids: torch.Tensor, index: int) -> torch.Tensor:
        """Ids within one vocabulary, and 0 for those of its neighbours; ids before the first or after the last stay."""
        local = input_ids - self._starts[index]
        if index > 0:
            local = local.clamp(min=0)
        if index < len(self._starts) - 1:
            local = local.masked_fill(input_ids >= self._starts[index + 1], 0)
        return local

    def reset_parameters(self) -> None:
        """Draw every vector from a normal distribution of standard deviation 0.02."""
        for table in self.token_embedding.parameters():
            nn.init.normal_(table, std=INIT_STD)
