"""Split embeddings against one embedding over the joined vocabulary."""

import pytest
import torch
import torch.nn.functional as F

from d9d.module.block.embedding import SplitTokenEmbeddings

SIZES = {"regular": 7, "special": 2, "images": 3}
ORDER = ["regular", "special", "images"]


def joined(embeddings: SplitTokenEmbeddings) -> torch.Tensor:
    return torch.cat([embeddings.token_embedding[name].weight for name in ORDER])


def test_equals_one_table():
    embeddings = SplitTokenEmbeddings(SIZES, ORDER, 4).double()
    # Every id, the borders of the vocabularies included, some twice.
    ids = torch.cat((torch.arange(12), torch.tensor([0, 6, 7, 8, 9, 11]))).view(3, 6)
    table = joined(embeddings).detach().requires_grad_()
    result, expected = embeddings(ids), F.embedding(ids, table)
    assert torch.equal(result, expected)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = torch.cat([embeddings.token_embedding[name].weight.grad for name in ORDER])
    torch.testing.assert_close(gradients, table.grad, rtol=1e-14, atol=0)


def test_the_order_is_that_of_ids():
    embeddings = SplitTokenEmbeddings(SIZES, ["images", "regular", "special"], 4)
    assert torch.equal(embeddings(torch.tensor(3)), embeddings.token_embedding["regular"].weight[0])
    assert torch.equal(embeddings(torch.tensor(11)), embeddings.token_embedding["special"].weight[1])


def test_one_vocabulary_and_no_tokens():
    embeddings = SplitTokenEmbeddings({"regular": 5}, ["regular"], 4)
    assert torch.equal(embeddings(torch.tensor([4])), embeddings.token_embedding["regular"].weight[4:])
    assert SplitTokenEmbeddings(SIZES, ORDER, 4)(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 4)


@pytest.mark.parametrize("token", [-1, 12])
@pytest.mark.parametrize("sizes", [SIZES, {"regular": 12}])
def test_ids_outside_are_refused(token: int, sizes: dict[str, int]):
    embeddings = SplitTokenEmbeddings(sizes, [name for name in ORDER if name in sizes], 4)
    with pytest.raises(IndexError):
        embeddings(torch.tensor([token]))


@pytest.mark.parametrize("order", [["regular"], [*ORDER, "audio"], [*ORDER, "regular"], []])
def test_order_must_name_each_vocabulary_once(order: list[str]):
    with pytest.raises(ValueError, match="exactly once"):
        SplitTokenEmbeddings(SIZES, order, 4)


def test_vocabularies_must_have_tokens():
    with pytest.raises(ValueError, match=r"no tokens for \['special'\]"):
        SplitTokenEmbeddings({"regular": 4, "special": 0}, ["regular", "special"], 4)


def test_reset_gives_every_parameter_a_value():
    torch.manual_seed(0)
    embeddings = SplitTokenEmbeddings({"regular": 500, "special": 500}, ["regular", "special"], 16)
    for parameter in embeddings.parameters():
        parameter.data.fill_(float("nan"))
    embeddings.reset_parameters()
    assert joined_std(embeddings) == pytest.approx(0.02, rel=0.05)


def joined_std(embeddings: SplitTokenEmbeddings) -> float:
    return torch.cat(list(embeddings.parameters())).std().item()
