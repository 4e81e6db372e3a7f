"""For tests: strategies for trajectories and batches here, a vLLM server with faults on request in ``fake_vllm``."""

from sorl_lightning.testing.strategies import batches, trajectories

__all__ = ["batches", "trajectories"]
