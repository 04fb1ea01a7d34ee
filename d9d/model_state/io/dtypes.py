"""The dtypes that files of tensors can hold, for writing and reading alike."""

import torch

__all__ = ["FILE_DTYPES"]

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}

_TORCH_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

FILE_DTYPES: dict[str, torch.dtype] = {
    name: _TORCH_DTYPES[torch_name] for name, torch_name in _TORCH_NAMES.items() if torch_name in _TORCH_DTYPES
}
"""By their names in the file format, as far as the installed torch has them: older ones lack some of the narrow floats."""
