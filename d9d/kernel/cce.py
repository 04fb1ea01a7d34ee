"""Cross entropy of a linear classifier, by the name and arguments of the package cut-cross-entropy."""

from typing import Final, Literal, assert_never

import torch

from d9d.kernel.cut_cross_entropy import linear_cross_entropy_per_token

IGNORE_INDEX: Final = -100
"""The label of tokens that have no loss, as in `torch.nn.functional.cross_entropy`."""


LCE_IMPL_DEFAULT: Final = "cce"
"""The package's default implementation."""


def linear_cross_entropy(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: Literal[False] = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: object = LCE_IMPL_DEFAULT,
    vocab_parallel_options: object | None = None,
) -> torch.Tensor:
    """Return the cross entropy of ``softmax(e @ c.T)``, whose logits are never in memory as a whole.

    Gradients are exact: sums are taken in fp32 and no part is left out. So what the package has to choose how exact they
    are (``filter_*``, ``accum_*``, `impl`) is accepted and changes nothing. In a split backward pass each half computes
    its gradient only. See [Note: Cut cross entropy].

    Shapes:
        ``(..., T, H)``, ``(V, H)`` and ``(..., T)``; the result is one value, or ``(..., T - shift)`` without reduction,
        in fp32, or in fp64 for fp64 inputs.

    Args:
        e: What is classified.
        c: Rows of the classifier.
        targets: Index of the right row, or `ignore_index`.
        bias: Not supported.
        ignore_index: The label of tokens without loss.
        softcap: Not supported.
        reduction: "mean" over the tokens that have a loss (not a number, if none has), "sum" or "none", which gives
            zeros where there is no loss.
        shift: Compare each token with the label this many places later; True is 1.
        return_lse: Not supported.
        filter_eps: Accepted.
        accum_e_fp32: Accepted.
        accum_c_fp32: Accepted.
        filter_e_grad: Accepted.
        filter_c_grad: Accepted.
        impl: Accepted: the package's implementations differ in speed and exactness only.
        vocab_parallel_options: Not supported.

    Raises:
        NotImplementedError: If an argument is given that is not supported.
        ValueError: If `reduction` is unknown, a label is missing for some token, or `shift` is too large.
    """
    _refuse_unsupported(
        bias=bias, softcap=softcap, return_lse=return_lse or None, vocab_parallel_options=vocab_parallel_options
    )
    kind = _reduction_of(reduction)
    if e.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}, but e {tuple(e.shape)} has {tuple(e.shape[:-1])} tokens. "
            f"Pass one label per token, {ignore_index} for none."
        )
    num_tokens = targets.shape[-1] if targets.ndim else 1
    if not 0 <= shift <= num_tokens:
        raise ValueError(f"shift ({shift}) must be from 0 to the number of tokens ({num_tokens}).")
    if shift:
        e, targets = e[..., :-shift, :], targets[..., shift:]
    labels = targets.flatten()
    losses = linear_cross_entropy_per_token(e.reshape(-1, e.shape[-1]), [c], labels, ignore_index=ignore_index)
    match kind:
        case "none":
            return losses.view(targets.shape)
        case "sum":
            return losses.sum()
        case "mean":
            return losses.sum() / (labels != ignore_index).sum()
        case _:
            assert_never(kind)


def _reduction_of(name: str) -> Literal["none", "sum", "mean"]:
    match name:
        case "none" | "sum" | "mean":
            return name
        case _:
            raise ValueError(f'reduction ({name!r}) must be "mean", "sum" or "none".')


def _refuse_unsupported(**arguments: object) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise NotImplementedError(
            f"linear_cross_entropy does not take {', '.join(given)}. For several ranks with parts of the vocabulary use "
            f"d9d.kernel.cut_cross_entropy.linear_cross_entropy_per_token; else compute logits and "
            f"torch.nn.functional.cross_entropy."
        )
