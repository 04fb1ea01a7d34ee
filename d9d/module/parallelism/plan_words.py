"""The words of pattern plans: which layers each is for, what it does to them, and which tensors it cuts.

[Note: words for blocks]
"colwise" and the like split single layers of torch. "attention", "ffn", "vocab", "sequence" and "expert" are about whole
blocks of `d9d.module.block`, of which they know the inside, so nothing below such a block is named. With the word "sequence"
for norms, a plan is sequence-parallel: ranks have parts of the tokens between blocks, as in [Note: activations between split
blocks], and every trained parameter belongs to something that the plan names.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TypeAlias, cast, get_args

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from d9d.core.dist_context import DENSE_DOMAIN, EXPERT_DOMAIN, DistributedContext
from d9d.module.block.attention import GroupedQueryAttention
from d9d.module.block.embedding import SplitTokenEmbeddings
from d9d.module.block.ffn import SwiGLU
from d9d.module.block.head import SplitLanguageModellingHead
from d9d.module.block.moe import MoELayer
from d9d.module.block.moe.all_to_all import check_expert_parallel
from d9d.module.block.normalization import RMSNorm
from d9d.module.parallelism.expert import parallelize_expert_parallel
from d9d.module.parallelism.tensor import parallelize_tensor
from d9d.module.parallelism.tensor_blocks import (
    check_tensor_parallel_heads,
    parallelize_tensor_attention,
    parallelize_tensor_embedding,
    parallelize_tensor_ffn,
    parallelize_tensor_head,
    parallelize_tensor_moe,
    parallelize_tensor_norm,
)

DataPlacement: TypeAlias = Literal["replicate", "shard", "hsdp"]
"""Where the parameters of a submodule are over the data-parallel ranks; "hsdp" is another word for "shard"."""

LayerSplit: TypeAlias = Literal["colwise", "colwise_gather", "colwise_dtensor", "rowwise", "rowwise_split", "vocab"]
"""How a layer is split over the tensor-parallel ranks.

- "colwise": a Linear (or Embedding) computes a part of its output features on each rank. The code behind it sees that part.
- "colwise_gather": the same, and the output is put together again.
- "colwise_dtensor": the same as "colwise", but the code behind it sees a DTensor of the whole shape.
- "rowwise": a Linear takes a part of its input features on each rank, as "colwise" leaves them; the outputs are summed.
- "rowwise_split": the same for an input that every rank has whole.
- "vocab": an Embedding holds a part of its rows on each rank; the outputs are summed. `SplitTokenEmbeddings` and
  `SplitLanguageModellingHead` too, whose loss is computed without whole logits.
"""

BlockSplit: TypeAlias = Literal["attention", "ffn", "sequence", "expert"]
"""How a block of `d9d.module.block` is split. See [Note: words for blocks].

- "attention": heads of a `GroupedQueryAttention` over the tensor-parallel ranks.
- "ffn": the width of a `SwiGLU` over the tensor-parallel ranks.
- "sequence": an `RMSNorm` sees a part of the tokens on each tensor-parallel rank, and blocks exchange such parts.
- "expert": experts of an `MoELayer` over the expert-parallel ranks, and the width of a shared one over the tensor-parallel ranks.
"""

Placement: TypeAlias = DataPlacement | LayerSplit | BlockSplit

DATA_WORDS = get_args(DataPlacement)
EXPERT_WORD = "expert"
SEQUENCE_WORD = "sequence"

_LAYERS: Mapping[str, tuple[type[nn.Module], ...]] = {
    "colwise": (nn.Linear, nn.Embedding),
    "colwise_gather": (nn.Linear, nn.Embedding),
    "colwise_dtensor": (nn.Linear, nn.Embedding),
    "rowwise": (nn.Linear,),
    "rowwise_split": (nn.Linear,),
    "vocab": (nn.Embedding, SplitTokenEmbeddings, SplitLanguageModellingHead),
    "attention": (GroupedQueryAttention,),
    "ffn": (SwiGLU,),
    "sequence": (RMSNorm,),
    "expert": (MoELayer,),
}
"""The classes of layers that each word is for."""

_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_dtensor": lambda: ColwiseParallel(use_local_output=False),
    "rowwise": RowwiseParallel,
    "rowwise_split": lambda: RowwiseParallel(input_layouts=Replicate()),
    "vocab": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""What a word means for a single layer of torch."""

WORDS = (*DATA_WORDS, *_LAYERS)

OPENING_WORDS = ("colwise", "colwise_dtensor")
"""Words behind which code sees a part of the features."""
CLOSING_WORD = "rowwise"
"""The word for a layer that takes a part of the features."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a plan says about one submodule."""

    module: nn.Module
    """The submodule."""
    pattern: str
    """The pattern that has named it."""
    value: Placement | ParallelStyle
    """A word, or one of torch's styles."""

    @property
    def style(self) -> ParallelStyle | None:
        """The torch style that splits a single layer; None for a block."""
        if isinstance(self.value, ParallelStyle):
            return self.value
        return _STYLES[self.value]() if isinstance(self.module, nn.Linear | nn.Embedding) else None

    @property
    def word(self) -> str:
        """The word, or the name of the style."""
        return self.value if isinstance(self.value, str) else type(self.value).__name__


def apply_split(choice: Choice, context: DistributedContext, *, sequence_parallel: bool) -> None:
    """Split a submodule over the tensor-parallel ranks, or its experts over the expert-parallel ranks, in place.

    No communication.

    Args:
        choice: What the plan says of it, without problems.
        context: Ranks of the job.
        sequence_parallel: Whether ranks have parts of the tokens between blocks.
    """
    mesh = context.mesh_for(DENSE_DOMAIN)["tp"]
    style = choice.style
    if style is not None:
        parallelize_tensor(choice.module, style, mesh)
        return
    match choice.module:
        case GroupedQueryAttention() as module:
            parallelize_tensor_attention(module, mesh, sequence_parallel=sequence_parallel)
        case SwiGLU() as module:
            parallelize_tensor_ffn(module, mesh, sequence_parallel=sequence_parallel)
        case SplitTokenEmbeddings() as module:
            parallelize_tensor_embedding(module, mesh, sequence_parallel=sequence_parallel)
        case SplitLanguageModellingHead() as module:
            parallelize_tensor_head(module, mesh, sequence_parallel=sequence_parallel)
        case RMSNorm() as module:
            parallelize_tensor_norm(module, mesh)
        case MoELayer() as module:
            if context.mesh_params.has_expert_parallel:
                parallelize_expert_parallel(module, context.mesh_for(EXPERT_DOMAIN)["ep_replicate", "ep_shard", "tp"])
            if context.mesh_params.has_tensor_parallel:
                parallelize_tensor_moe(module, mesh, sequence_parallel=sequence_parallel)
        case _:
            raise TypeError(f"{choice.word!r} is not for a {type(choice.module).__name__}")


def cut_dims(choice: Choice) -> Mapping[str, int | None]:
    """Return the tensor dimension along which a word cuts parameters, by their names in its module; None where it does not.

    Empty for styles of torch, which know themselves, and without what is left of a layer for other domains.
    """
    match choice.value, choice.module:
        case (("colwise" | "colwise_gather" | "colwise_dtensor"), module):
            return {"weight": 1} if isinstance(module, nn.Embedding) else {"weight": 0, "bias": 0}
        case (("rowwise" | "rowwise_split"), _):
            return {"weight": 1, "bias": None}
        case "vocab", module:
            return dict.fromkeys((name for name, _ in module.named_parameters()), 0)
        case "attention", module:
            return {name: _attention_dim(name) for name, _ in module.named_parameters()}
        case "ffn", module:
            return {name: 1 if name.startswith("down_proj") else 0 for name, _ in module.named_parameters()}
        case "expert", module:
            names = [name for name, _ in module.named_parameters() if not name.startswith("shared_expert.")]
            return {name: 0 if name.startswith("grouped_experts.") else None for name in names}
        case _:
            return {}


def _attention_dim(name: str) -> int | None:
    if name.startswith("o_proj"):
        return 1
    return None if "norm" in name else 0


def layer_problems(choice: Choice) -> Iterator[str]:
    """Say what about a layer makes it wrong for a word, whatever the degrees."""
    if isinstance(choice.value, ParallelStyle):
        return
    layer, classes = choice.module, _LAYERS[choice.word]
    if not isinstance(layer, classes):
        wanted = " or ".join(_class_name(each) for each in classes)
        yield f"is a {type(layer).__name__}, but {choice.value!r} is for {wanted}"
    elif isinstance(layer, nn.Linear | nn.Embedding) and any(True for _ in layer.children()):
        yield f"has submodules of its own: name the {type(layer).__name__} among them"
    elif isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse):
        yield "has max_norm or sparse gradients, and a split embedding cannot have them"


def size_problems(choice: Choice, tensor_parallel: int, expert_parallel: int) -> Iterator[str]:
    """Say which sizes do not fit the degrees.

    Between "colwise" and "rowwise" each rank has a plain tensor, and torch takes all of them to be of one size.
    """
    try:
        match choice.value, choice.module:
            case "attention", GroupedQueryAttention() as module:
                num_heads, num_kv_heads = (
                    each.out_features // module.head_dim for each in (module.q_proj, module.k_proj)
                )
                check_tensor_parallel_heads(num_heads, num_kv_heads, tensor_parallel)
            case "expert", MoELayer() as module:
                check_expert_parallel(module.num_experts, expert_parallel)
            case (("colwise" | "colwise_dtensor" | "rowwise"), module):
                yield from _feature_problems(choice, module, tensor_parallel)
            case _:
                pass
    except ValueError as error:
        yield f"does not fit: {str(error).removesuffix('.')}"


def _feature_problems(choice: Choice, module: nn.Module, degree: int) -> Iterator[str]:
    dim = cast(int, cut_dims(choice)["weight"])
    size = module.get_parameter("weight").size(dim)
    if size % degree:
        valid = [str(divisor) for divisor in range(1, size + 1) if size % divisor == 0]
        shown = ", ".join(valid[:8]) + (", ..." if len(valid) > 8 else "")
        yield (
            f"has {size} features to split, which tensor_parallel ({degree}) does not divide: valid degrees are {shown}, "
            f"and 'colwise_gather' and 'rowwise_split' take any"
        )


def likely_word(module: nn.Module) -> str | None:
    """Return the word that is meant for a block, to propose it."""
    blocks = ("attention", "ffn", "vocab", "expert")
    return next(
        (word for word in blocks if isinstance(module, _LAYERS[word]) and not isinstance(module, nn.Embedding)), None
    )


def _class_name(layer: type[nn.Module]) -> str:
    return f"nn.{layer.__name__}" if layer.__module__.startswith("torch.") else layer.__name__
