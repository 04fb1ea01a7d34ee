"""Model states on disk: reads and writes them, and fills modules from them."""

from d9d.model_state.io.load import load_model_state
from d9d.model_state.io.reader import read_model_state
from d9d.model_state.io.save import (
    BackgroundExport,
    save_model_state,
    save_model_state_pipeline_parallel,
)
from d9d.model_state.io.source import ModelStateSource, TensorInfo, examine_model_state, open_model_state
from d9d.model_state.io.writer import (
    write_model_state_distributed,
    write_model_state_local,
    write_model_state_pipeline_parallel,
)

__all__ = [
    "BackgroundExport",
    "ModelStateSource",
    "TensorInfo",
    "examine_model_state",
    "load_model_state",
    "open_model_state",
    "read_model_state",
    "save_model_state",
    "save_model_state_pipeline_parallel",
    "write_model_state_distributed",
    "write_model_state_local",
    "write_model_state_pipeline_parallel",
]
