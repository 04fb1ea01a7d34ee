"""Re-exports the stage of a pipeline."""

from d9d.pipelining.stage import PipelineStage

__all__ = ["PipelineStage"]
