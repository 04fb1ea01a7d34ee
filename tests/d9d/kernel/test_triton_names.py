"""Names that need Triton: what they say without it, and what they are where it can be imported."""

import importlib.util

import pytest

from d9d.kernel.general import get_int_dtype

HAS_TRITON = importlib.util.find_spec("triton") is not None


def test_widths_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="not of 24"):
        get_int_dtype(24, signed=True)


@pytest.mark.skipif(HAS_TRITON, reason="Triton is installed")
def test_without_triton_errors_say_what_to_install():
    with pytest.raises(ImportError, match='"pip install triton"'):
        get_int_dtype(32, signed=True)
    with pytest.raises(ImportError, match='"pip install triton"'):
        importlib.import_module("d9d.kernel.stochastic.ops")


def test_integer_types():
    language = pytest.importorskip("triton.language")
    for width in (8, 16, 32, 64):
        assert get_int_dtype(width, signed=True) == getattr(language, f"int{width}")
        assert get_int_dtype(width, signed=False) == getattr(language, f"uint{width}")
