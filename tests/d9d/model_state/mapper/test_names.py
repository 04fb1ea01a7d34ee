"""Names in messages: bounded lists and near misses."""

import pytest

from d9d.model_state.mapper.names import NearestNames, capped, distinct, listed


def test_lists_are_sorted_and_bounded():
    assert listed(["b", "a"]) == "'a', 'b'"
    assert listed([]) == ""
    assert listed(map(str, range(12)), limit=2) == "'0', '1' and 10 more"


def test_descriptions_are_bounded_and_keep_their_order():
    assert capped([3, 1, 2]) == "3, 1, 2"
    assert capped([3, 1, 2], limit=2) == "3, 1 and 1 more"
    assert capped(["b", "a", "c"], 1, repr, by_line=True) == "'b'\nand 2 more"
    assert capped(["b", "a"], by_line=True) == "b\na"
    assert capped([]) == ""
    described: list[int] = []
    capped(range(100), 2, lambda item: str(described.append(item)))
    assert described == [0, 1]


def test_the_nearest_name_is_found_among_many():
    names = [f"model.layers.{index}.self_attn.q_proj.weight" for index in range(1000)]
    nearest = NearestNames(names)
    assert nearest.hint("model.layer.517.self_attn.q_proj.weight") == f" (nearest: '{names[517]}')"
    assert nearest.hint("zzz") == ""
    assert NearestNames([]).hint("a") == ""
    assert nearest.described(["zzz", "model.layers.3.self_attn.q_prj.weight", "zz"], limit=2) == (
        f"'model.layers.3.self_attn.q_prj.weight' (nearest: '{names[3]}'), 'zz' and 1 more"
    )


def test_short_names_have_nearest_names_too():
    assert NearestNames(["alpha", "beta"]).hint("bta") == " (nearest: 'beta')"


def test_distinct_names():
    assert distinct("names", ["b", "a"]) == ("b", "a")
    with pytest.raises(ValueError, match="names must be different names, at least one; there is none"):
        distinct("names", [])
    with pytest.raises(ValueError, match="there is 'a', 'b' more than once"):
        distinct("names", ["b", "a", "b", "a", "c"])
