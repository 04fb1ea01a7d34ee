"""Which submodules become FSDP units, by hand count."""

from torch import nn

from d9d.module.parallelism.units import repeated_blocks, wrap_by_size


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))  # 16 + 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)  # 12 + 4
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(4, 2)  # 8 + 2


def test_smallest_modules_of_the_size():
    model = Model()
    assert wrap_by_size(model, 32) == list(model.blocks)
    # 16 is the size of each inner layer and of the stem.
    inner = [layer for entry in model.blocks for layer in entry]
    assert wrap_by_size(model, 16) == [model.stem, *inner]
    assert wrap_by_size(model, 10) == [model.stem, *inner, model.head]


def test_containers_and_the_root_are_never_units():
    model = Model()
    # Together the blocks have 96 parameters, but a ModuleList is not called.
    assert wrap_by_size(model, 90) == []
    assert wrap_by_size(model, 10**9) == []
    assert wrap_by_size(nn.Sequential(block(), block()), 64) == []


def test_what_a_unit_covers_does_not_count_again():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)))  # 16 + 8
    assert wrap_by_size(model, 16) == [model[0][0]]
    assert wrap_by_size(model, 8) == [model[0][0], model[0][1]]
    assert wrap_by_size(model, 24) == [model[0]]


def test_repeated_blocks_are_the_outermost():
    model = Model()
    assert repeated_blocks(model) == list(model.blocks)
    assert repeated_blocks(model, min_repeats=4) == []
    assert repeated_blocks(nn.Linear(2, 2)) == []


def test_layers_without_children_are_no_blocks():
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []


def test_stacks_inside_blocks_of_one_kind_only():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2, enable_nested_tensor=False)
    model = nn.ModuleDict({"encoder": encoder, "other": nn.Linear(2, 2)})
    assert repeated_blocks(model) == list(encoder.layers)
    mixed = nn.Sequential(block(), block(), encoder)
    assert repeated_blocks(mixed) == [mixed[0], mixed[1], *encoder.layers]


def test_a_block_used_twice_is_one_unit():
    shared = block()
    assert repeated_blocks(nn.ModuleList([shared, shared, block()]))[:1] == [shared]
    assert len(repeated_blocks(nn.ModuleList([shared, shared, block()]))) == 2
    assert len(wrap_by_size(nn.Sequential(shared, shared), 32)) == 1
