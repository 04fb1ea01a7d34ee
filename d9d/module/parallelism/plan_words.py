"""The words of pattern plans: which layers each is for, what it does to them, and which tensors it cuts.

[Note: words for blocks]
"colwise" and the like split single layers of torch. "attention", "ffn", "vocab", "sequence", "pooling" and "expert" are about
whole blocks of `d9d.module.block`, of which they know the inside, so nothing below such a block is named. With the word
"sequence" for norms, a plan is sequence-parallel: ranks have parts of the tokens between blocks, as in [Note: activations
between split blocks], and every trained parameter, and every dropout, belongs to something that the plan names.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from d9d.core.dist_context import BATCH_DOMAIN, DENSE_DOMAIN, EXPERT_DOMAIN, DistributedContext
from d9d.module.block.attention import GroupedQueryAttention, MultiHeadLatentAttention
from d9d.module.block.embedding import SplitTokenEmbeddings
from d9d.module.block.ffn import SwiGLU
from d9d.module.block.head import ClassificationHead, EmbeddingHead, SplitLanguageModellingHead
from d9d.module.block.moe import MoELayer
from d9d.module.block.moe.all_to_all import check_expert_parallel
from d9d.module.block.normalization import RMSNorm
from d9d.module.parallelism.context_parallel import parallelize_context
from d9d.module.parallelism.expert import parallelize_expert_parallel
from d9d.module.parallelism.fused import FusedColwiseParallel
from d9d.module.parallelism.key_value_exchange import ContextParallelMethod
from d9d.module.parallelism.style import DropoutOfParts
from d9d.module.parallelism.tensor import SplitsItself, parallelize_tensor
from d9d.module.parallelism.tensor_blocks import (
    check_tensor_parallel_heads,
    parallelize_tensor_attention,
    parallelize_tensor_embedding,
    parallelize_tensor_ffn,
    parallelize_tensor_head,
    parallelize_tensor_latent_attention,
    parallelize_tensor_moe,
    parallelize_tensor_norm,
    parallelize_tensor_pooling_head,
)

DataPlacement: TypeAlias = Literal["replicate", "shard", "hsdp"]
"""Where the parameters of a submodule are over the data-parallel ranks; "hsdp" is another word for "shard"."""

LayerSplit: TypeAlias = Literal[
    "colwise", "colwise_gather", "colwise_dtensor", "rowwise", "rowwise_split", "vocab", "dropout"
]
"""How a layer is split over the tensor-parallel ranks.

- "colwise": a Linear (or Embedding) computes a part of its output features on each rank. The code behind it sees that part.
- "colwise_gather": the same, and the output is put together again.
- "colwise_dtensor": the same as "colwise", but the code behind it sees a DTensor of the whole shape.
- "rowwise": a Linear takes a part of its input features on each rank, as "colwise" leaves them; the outputs are summed.
- "rowwise_split": the same for an input that every rank has whole.
- "vocab": an Embedding holds a part of its rows on each rank; the outputs are summed. `SplitTokenEmbeddings` and
  `SplitLanguageModellingHead` too, whose loss is computed without whole logits.
- "colwise_fused(8, 2, 2)": a Linear whose output has groups of so many heads, or features, side by side: a rank has its part of
  each. See [Note: parts of fused layers].
- "dropout": a Dropout draws a mask of its own on each rank, as it sees a part of the features, behind "colwise", or of the
  tokens. All others draw the same on all tensor-parallel ranks.
"""

BlockSplit: TypeAlias = Literal["attention", "attention_shared_kv", "ffn", "sequence", "pooling", "expert"]
"""How a block of `d9d.module.block` is split. See [Note: words for blocks].

- "attention": heads of a `GroupedQueryAttention` or `MultiHeadLatentAttention` over the tensor-parallel ranks.
- "attention_shared_kv": the same for a `GroupedQueryAttention` that may have fewer key and value heads than there are ranks.
- "ffn": the width of a `SwiGLU` over the tensor-parallel ranks.
- "sequence": an `RMSNorm` sees a part of the tokens on each tensor-parallel rank, and blocks exchange such parts.
- "pooling": a `ClassificationHead` or `EmbeddingHead` sees all tokens where blocks exchange parts of them.
- "expert": experts of an `MoELayer` over the expert-parallel ranks, and the width of a shared one over the tensor-parallel ranks.
"""

ContextSplit: TypeAlias = Literal["context", "context_all_gather"]
"""How attention sees the tokens of all context-parallel ranks; routers and heads that pool count these too.

- "context": keys and values travel in a ring. See `parallelize_context`; sequences are cut in zigzag order.
- "context_all_gather": all of them travel at once.
"""

Placement: TypeAlias = DataPlacement | LayerSplit | BlockSplit | ContextSplit

DATA_WORDS = get_args(DataPlacement)
CONTEXT_WORDS = get_args(ContextSplit)
EXPERT_WORD = "expert"
SEQUENCE_WORD = "sequence"

_LAYERS: Mapping[str, tuple[type, ...]] = {
    "colwise": (nn.Linear, nn.Embedding, SplitsItself),
    "colwise_gather": (nn.Linear, nn.Embedding, SplitsItself),
    "colwise_dtensor": (nn.Linear, nn.Embedding, SplitsItself),
    "rowwise": (nn.Linear, SplitsItself),
    "rowwise_split": (nn.Linear, SplitsItself),
    "vocab": (nn.Embedding, SplitTokenEmbeddings, SplitLanguageModellingHead),
    "dropout": (nn.Dropout,),
    "attention": (GroupedQueryAttention, MultiHeadLatentAttention),
    "attention_shared_kv": (GroupedQueryAttention,),
    "ffn": (SwiGLU,),
    "sequence": (RMSNorm,),
    "pooling": (ClassificationHead, EmbeddingHead),
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
    "dropout": DropoutOfParts,
}
"""What a word means for a single layer of torch."""

WORDS = (*DATA_WORDS, *_LAYERS, *CONTEXT_WORDS)

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
        is_single = isinstance(self.module, nn.Linear | nn.Embedding | nn.Dropout | SplitsItself)
        return _STYLES[self.value]() if is_single else None

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
    mesh, style = context.mesh_for(DENSE_DOMAIN)["tp"], choice.style
    if style is not None:
        parallelize_tensor(choice.module, style, mesh)
    elif isinstance(choice.module, MoELayer):
        if context.mesh_params.has_expert_parallel:
            experts = context.mesh_for(EXPERT_DOMAIN)["ep_replicate", "ep_shard", "tp"]
            parallelize_expert_parallel(choice.module, experts)
        if context.mesh_params.has_tensor_parallel:
            parallelize_tensor_moe(choice.module, mesh, sequence_parallel=sequence_parallel)
    else:
        _split_block(choice, mesh, sequence_parallel)


def _split_block(choice: Choice, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    match choice.module:
        case GroupedQueryAttention() as module:
            shares = choice.value == "attention_shared_kv"
            parallelize_tensor_attention(module, mesh, sequence_parallel=sequence_parallel, replicate_kv_heads=shares)
        case MultiHeadLatentAttention() as module:
            parallelize_tensor_latent_attention(module, mesh, sequence_parallel=sequence_parallel)
        case SwiGLU() as module:
            parallelize_tensor_ffn(module, mesh, sequence_parallel=sequence_parallel)
        case SplitTokenEmbeddings() as module:
            parallelize_tensor_embedding(module, mesh, sequence_parallel=sequence_parallel)
        case SplitLanguageModellingHead() as module:
            parallelize_tensor_head(module, mesh, sequence_parallel=sequence_parallel)
        case RMSNorm() as module:
            parallelize_tensor_norm(module, mesh)
        case (ClassificationHead() | EmbeddingHead()) as module:
            if sequence_parallel:
                parallelize_tensor_pooling_head(module, mesh)
        case module:
            raise TypeError(f"{choice.word!r} is not for a {type(module).__name__}")


def apply_context(choice: Choice, context: DistributedContext) -> None:
    """Let the attention of a submodule see the tokens of all context-parallel ranks, in place. No communication."""
    method = ContextParallelMethod.all_gather if choice.value == "context_all_gather" else ContextParallelMethod.ring
    parallelize_context(choice.module, context.mesh_for(BATCH_DOMAIN)["cp"], method=method)


class Cut(NamedTuple):
    """How a word cuts one parameter."""

    mesh_dim: str
    """Along which dimension of the mesh; its domain is where the parameter is."""
    dim: int | None
    """Dimension of the tensor; None where it stays whole."""


def cuts_of(choice: Choice, tensor_parallel: int) -> Mapping[str, Cut]:
    """Return how a word cuts parameters, by their names in its module.

    Of a fused layer, how its parts are. Empty for styles of torch, which know themselves, and without what a word leaves alone.
    """
    dims: Mapping[str, int | None]
    names = [name for name, _ in choice.module.named_parameters()]
    match choice.value, choice.module:
        case ((FusedColwiseParallel() | "colwise" | "colwise_gather" | "colwise_dtensor"), module):
            dims = {"weight": 1} if isinstance(module, nn.Embedding) else {"weight": 0, "bias": 0}
            dims = module.split_dims(0) if isinstance(module, SplitsItself) else dims
        case (("rowwise" | "rowwise_split"), module):
            dims = module.split_dims(1) if isinstance(module, SplitsItself) else {"weight": 1, "bias": None}
        case "vocab", _:
            dims = dict.fromkeys(names, 0)
        case "ffn", module:
            dims = _dims_of_block(module, _ffn_dim)
        case (("attention" | "attention_shared_kv"), module):
            has_whole_keys = isinstance(module, GroupedQueryAttention) and _num_kv_heads(module) % tensor_parallel
            whole = ("norm", "kv_down_proj", "q_proj.down_proj", *(("k_proj", "v_proj") if has_whole_keys else ()))
            dims = _dims_of_block(
                module, lambda name: None if any(part in name for part in whole) else _width_dim(name, "o_proj")
            )
        case "expert", MoELayer() as module:
            shared, inside = "shared_expert.", "shared_expert.mlp."
            widths = {} if module.shared_expert is None else _dims_of_block(module.shared_expert.mlp, _ffn_dim)
            experts = {name: 0 if name.startswith("grouped_experts.") else None for name in names}
            return {
                **{name: Cut("ep_shard", dim) for name, dim in experts.items() if not name.startswith(shared)},
                **{f"{inside}{name}": Cut("tp", dim) for name, dim in widths.items()},
            }
        case _:
            dims = {}
    return {name: Cut("tp", dim) for name, dim in dims.items()}


def _dims_of_block(module: nn.Module, dim_of: Callable[[str], int | None]) -> dict[str, int | None]:
    """Return along which dimension each parameter of a block is cut, from what is so of its layers without adapters."""
    dims = {name: dim_of(name) for name, _ in module.named_parameters()}
    for name, child in module.named_modules():
        if isinstance(child, SplitsItself):
            dim = dim_of(f"{name}.weight")
            own = dict.fromkeys(child.split_dims(0)) if dim is None else child.split_dims(dim)
            dims.update({f"{name}.{key}": value for key, value in own.items()})
    return dims


def _ffn_dim(name: str) -> int | None:
    return _width_dim(name, "down_proj")


def _width_dim(name: str, last_layer: str) -> int | None:
    """Tell along which dimension a parameter of a block is cut, whose last layer takes what all others give."""
    if not name.startswith(last_layer):
        return 0
    return None if name.endswith("bias") else 1


def _num_kv_heads(module: GroupedQueryAttention) -> int:
    return module.k_proj.out_features // module.head_dim


def layer_problems(choice: Choice) -> Iterator[str]:
    """Say what about a layer makes it wrong for a word, whatever the degrees."""
    if isinstance(choice.value, ParallelStyle):
        return
    layer, classes = choice.module, _LAYERS.get(choice.word, (nn.Module,))
    if not isinstance(layer, classes):
        wanted = " or ".join(_class_name(each) for each in classes)
        yield f"is a {type(layer).__name__}, but {choice.value!r} is for {wanted}"
    elif isinstance(layer, nn.Linear | nn.Embedding) and any(True for _ in layer.children()):
        yield f"has submodules of its own: name the {type(layer).__name__} among them"
    elif isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse):
        yield "has max_norm or sparse gradients, and a split embedding cannot have them"


def size_problems(choice: Choice, tensor_parallel: int, expert_parallel: int) -> Iterator[str]:
    """Say which sizes do not fit the degrees.

    Between "colwise" and "rowwise" each rank has a plain tensor, and torch takes all of them to be of one size. A DTensor, as
    "colwise_dtensor" leaves it, knows better.
    """
    try:
        match choice.value, choice.module:
            case (("attention" | "attention_shared_kv"), GroupedQueryAttention() as module):
                shares = choice.value == "attention_shared_kv"
                num_heads, num_kv_heads = module.q_proj.out_features // module.head_dim, _num_kv_heads(module)
                check_tensor_parallel_heads(num_heads, num_kv_heads, tensor_parallel, replicate_kv_heads=shares)
            case "attention", MultiHeadLatentAttention() as module:
                check_tensor_parallel_heads(module.num_heads, module.num_heads, tensor_parallel)
            case FusedColwiseParallel() as style, module:
                style.check(module, tensor_parallel)
            case "expert", MoELayer() as module:
                check_expert_parallel(module.num_experts, expert_parallel)
            case (("colwise" | "rowwise"), module):
                yield from _feature_problems(choice, module, tensor_parallel)
            case _:
                pass
    except (ValueError, NotImplementedError) as error:
        yield f"does not fit: {str(error).removesuffix('.')}"


def _feature_problems(choice: Choice, module: nn.Module, degree: int) -> Iterator[str]:
    name, dim = next((name, cut.dim) for name, cut in cuts_of(choice, degree).items() if cut.dim is not None)
    size = module.get_parameter(name).size(dim)
    if size % degree:
        valid = [str(divisor) for divisor in range(1, size + 1) if size % divisor == 0]
        shown = ", ".join(valid[:8]) + (", ..." if len(valid) > 8 else "")
        yield (
            f"has {size} features to split, which tensor_parallel ({degree}) does not divide: valid degrees are {shown}, "
            f"and 'colwise_gather', 'rowwise_split' and 'colwise_dtensor' in front of 'rowwise' take any"
        )


def likely_word(module: nn.Module) -> str | None:
    """Return the word that is meant for a block, to propose it."""
    blocks = ("attention", "ffn", "vocab", "expert")
    return next(
        (word for word in blocks if isinstance(module, _LAYERS[word]) and not isinstance(module, nn.Embedding)), None
    )


def _class_name(layer: type) -> str:
    return f"nn.{layer.__name__}" if layer.__module__.startswith("torch.") else layer.__name__
