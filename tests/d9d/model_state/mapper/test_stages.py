"""Which groups of stages hang together, and the order in which they run."""

from d9d.model_state.mapper import StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import (
    ModelStateMapperConcatenateTensors,
    ModelStateMapperRename,
    ModelStateMapperTie,
)
from d9d.model_state.mapper.stages import link_stages


def test_groups_come_in_the_order_of_their_first_names_and_run_stage_by_stage():
    renames = [ModelStateMapperRename(name, f"{name}.1") for name in ("d", "b", "c", "a")]
    linked = link_stages(
        [
            ModelStateMapperParallel(renames),
            ModelStateMapperParallel([ModelStateMapperConcatenateTensors(["d.1", "b.1", "x"], "y", 0)]),
        ]
    )
    assert [component.group for component in linked] == [
        StateGroup(frozenset("a"), frozenset(["a.1"])),
        StateGroup(frozenset("bdx"), frozenset("y")),
        StateGroup(frozenset("c"), frozenset(["c.1"])),
    ]
    seen: list[list[str]] = []

    def translate(mapper: object, tensors: dict[str, int]) -> dict[str, int]:
        seen.append(sorted(tensors))
        return (
            {f"{name}.1": value for name, value in tensors.items()}
            if len(tensors) == 1
            else {"y": sum(tensors.values())}
        )

    assert linked[1].run({"x": 4, "d": 2, "b": 1}, translate) == {"y": 7}
    assert seen == [["b"], ["d"], ["b.1", "d.1", "x"]]


def test_steps_that_make_only_optional_tensors_are_left_out():
    renames = ModelStateMapperParallel([ModelStateMapperRename("e", "e.1"), ModelStateMapperRename("h", "h.1")])
    (component,) = link_stages([renames, ModelStateMapperTie(["e.1", "h.1"], ["t"])])
    assert component.optional == {"h"}
    ran: list[list[str]] = []

    def translate(mapper: object, tensors: dict[str, str]) -> dict[str, str]:
        ran.append(sorted(tensors))
        return {"t": "tied"} if "e.1" in tensors else {f"{name}.1": value for name, value in tensors.items()}

    assert component.run({"e": "weight"}, translate) == {"t": "tied"}
    assert ran == [["e"], ["e.1"]]
