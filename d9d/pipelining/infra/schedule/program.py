"""Re-exports the program builders."""

from d9d.pipelining.programs import Interleaved1F1BPipelineProgramBuilder, LoopedBFSPipelineProgramBuilder
from d9d.pipelining.programs_v import DualPipeVPipelineProgramBuilder, ZeroBubbleVPipelineProgramBuilder

__all__ = [
    "DualPipeVPipelineProgramBuilder",
    "Interleaved1F1BPipelineProgramBuilder",
    "LoopedBFSPipelineProgramBuilder",
    "ZeroBubbleVPipelineProgramBuilder",
]
