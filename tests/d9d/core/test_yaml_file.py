"""Files of settings: plain values only, and no more of them than somebody has written."""

import re
from pathlib import Path

import pytest

from d9d.core.yaml_file import read_yaml


def written(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_plain_values(tmp_path):
    text = "base: &base {lr: 0.1, betas: [0.9, 0.95]}\nrun:\n  <<: *base\n  steps: 3\n"
    run = {"lr": 0.1, "betas": [0.9, 0.95], "steps": 3}
    assert read_yaml(written(tmp_path, text)) == {"base": {"lr": 0.1, "betas": [0.9, 0.95]}, "run": run}
    assert read_yaml(written(tmp_path, "")) is None


NINE_TIMES = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 9)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "is no YAML file"),
        ("a: !!python/object/apply:os.system ['true']", "is no YAML file"),
        ("\n".join(["x0: &x0 [lol]", *NINE_TIMES]), "aliases counted each time"),  # 9^8 = 43 million
        ("a: &a [*a]", "in themselves"),
        ("[" * 5000, "too deeply"),
        ("#" * (1 << 20) + "\n", "more than 1048576 bytes"),
        ("a: \0", "is no YAML file"),
        ("a: 2020-99-99", "is no YAML file"),
        ("a: !!int abc", "is no YAML file"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=said) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3 repeats 'a' of line 1"),
        ("x:\n  - {k: 1, k: 2}\n", "line 2 repeats 'k' of line 2"),
        ("1: a\n1.0: b\n", "line 2 repeats 1.0 of line 1"),
        ("a: {b: 1}\nc: {d: {b: 1, b: 2}}\na: 2", "line 3 repeats 'a' of line 1; line 2 repeats 'b' of line 2"),
    ],
)
def test_repeated_keys(text, problem, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"settings.yaml: {problem}. Remove all but one of each.")):
        read_yaml(written(tmp_path, text))


def test_merged_mappings_may_be_overridden(tmp_path):
    text = "base: &b {x: 1, y: 2}\nmore: &m {<<: *b, x: 3}\nlast: {<<: *m, x: 4}\nsame: *m\n"
    more = {"x": 3, "y": 2}
    assert read_yaml(written(tmp_path, text)) == {
        "base": {"x": 1, "y": 2},
        "more": more,
        "last": {"x": 4, "y": 2},
        "same": more,
    }
