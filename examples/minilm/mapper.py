"""How the tensors of a BERT in Hugging Face layout become those of our encoder. The way back is `.inverse()`."""

from model import EncoderConfig

from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.compose import (
    ModelStateMapperParallel,
    ModelStateMapperPrefixScope,
    ModelStateMapperSequential,
)
from d9d.model_state.mapper.leaf import (
    ModelStateMapperConcatenateTensors,
    ModelStateMapperIdentity,
    ModelStateMapperRename,
    ModelStateMapperStackedToInterleaved,
)

# Our name -> theirs, of modules with a weight and a bias.
OF_ENCODER = {"embeddings.norm": "embeddings.LayerNorm", "pooler": "pooler.dense"}
OF_LAYER = {
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
EMBEDDINGS = {"tokens": "word", "positions": "position", "segments": "token_type"}


def mapper_from_huggingface(config: EncoderConfig, prefix: str = "") -> ModelStateMapper:
    """Return the mapper from a checkpoint to `Encoder`.

    Args:
        config: Sizes of the encoder.
        prefix: What its names begin with, if it is a part of another module: "encoder.".
    """
    mappers: list[ModelStateMapper] = [
        ModelStateMapperIdentity("embeddings.position_ids"),
        *(
            ModelStateMapperRename(f"embeddings.{theirs}_embeddings.weight", f"embeddings.{ours}.weight")
            for ours, theirs in EMBEDDINGS.items()
        ),
        *(
            ModelStateMapperRename(f"{theirs}.{part}", f"{ours}.{part}")
            for ours, theirs in OF_ENCODER.items()
            for part in ("weight", "bias")
        ),
        *(
            ModelStateMapperPrefixScope(layer, source_prefix=f"encoder.layer.{i}.", target_prefix=f"layers.{i}.")
            for i, layer in enumerate([map_layer(config)] * config.num_hidden_layers)
        ),
    ]
    return ModelStateMapperPrefixScope(ModelStateMapperParallel(mappers), target_prefix=prefix)


def map_layer(config: EncoderConfig) -> ModelStateMapper:
    """Return the mapper of one layer, without the prefixes of its names."""
    mappers: list[ModelStateMapper] = []
    for part in ("weight", "bias"):
        mappers.append(map_attention(config, part))
        mappers += [ModelStateMapperRename(f"{theirs}.{part}", f"{ours}.{part}") for ours, theirs in OF_LAYER.items()]
    return ModelStateMapperParallel(mappers)


def map_attention(config: EncoderConfig, part: str) -> ModelStateMapper:
    """Join query, key and value, and order their rows by heads, as `Attention` has them."""
    fused = f"attention.qkv.{part}"
    join = ModelStateMapperConcatenateTensors(
        source_names=[f"attention.self.{name}.{part}" for name in ("query", "key", "value")],
        target_name=fused,
        dim=0,
        sizes=[config.hidden_size] * 3,
    )
    by_heads = ModelStateMapperStackedToInterleaved(
        fused, fused, dim=0, group_sizes=[config.head_size] * 3, num_groups=config.num_attention_heads
    )
    return ModelStateMapperSequential([join, by_heads])
