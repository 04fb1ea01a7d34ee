"""A BERT encoder of sentences in plain PyTorch, with one linear layer for query, key and value.

Axes: B sentences, T tokens, D features, H heads, K features of a head.
"""

import dataclasses
import json
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes of an encoder, under the names that `config.json` has for them."""

    vocab_size: int
    type_vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def read(cls, directory: Path) -> "EncoderConfig":
        """Read the sizes of a checkpoint."""
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


class Embeddings(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.segments = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        # A buffer in the state, since the checkpoint has it too.
        self.register_buffer("position_ids", torch.arange(config.max_position_embeddings).unsqueeze(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = self.positions(self.position_ids[:, : tokens.shape[1]])  # (1, T, D)
        segments = self.segments(torch.zeros_like(tokens))  # (B, T, D)
        return self.norm(self.tokens(tokens) + positions + segments)


class Attention(nn.Module):
    """Self-attention. The rows of `qkv` are those of head 0 (query, key, value), then those of head 1, and so on.

    So an equal part of the rows is a number of whole heads: this is what a tensor-parallel rank gets of it.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.head_size = config.head_size
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))  # (B, T, H, 3, K)
        query, key, value = heads.transpose(1, 2).unbind(-2)  # (B, H, T, K) each
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        return self.out(attended.transpose(1, 2).flatten(-2))  # (B, T, D)


class Layer(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.mlp_norm(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """BERT without dropout: a few steps of fine-tuning do without."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        # Sentence embeddings do not use it. It is here so that an export has all that the checkpoint had.
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size).requires_grad_(False)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return x  # (B, T, D)


def sentence_embeddings(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average the tokens of each sentence, and scale to length 1. (..., T, D), (..., T) -> (..., D)"""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * weights).sum(-2) / weights.sum(-2), dim=-1)


class SentenceEncoder(L.LightningModule):
    """Learns how similar two sentences are: an ordinary LightningModule, without a line about checkpoints or ranks."""

    def __init__(self, config: EncoderConfig, learning_rate: float = 1e-4):
        super().__init__()
        self.learning_rate = learning_rate
        self.encoder = Encoder(config)

    def forward(self, tokens, mask):
        """Embed pairs of sentences, (B, 2, T) -> (B, 2, D)."""
        hidden = self.encoder(tokens.flatten(0, 1), mask.flatten(0, 1))  # (2 B, T, D)
        return sentence_embeddings(hidden.unflatten(0, (-1, 2)), mask)

    def similarity_loss(self, batch):
        first, second = self(batch["tokens"], batch["mask"]).unbind(1)
        return F.mse_loss(F.cosine_similarity(first, second), batch["similarity"])

    def training_step(self, batch, batch_idx):
        return self.similarity_loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.similarity_loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        difference = (self(batch["tokens"], batch["mask"]) - batch["expected"]).abs().max()
        self.log("max_difference", difference, reduce_fx="max", sync_dist=True)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)
