"""Stand-ins for what takes minutes to start. They show what the trainer does with an answer, not what a server answers."""

from sorl_lightning.testing.fake_vllm import FakeVLLM, Fault

__all__ = ["FakeVLLM", "Fault"]
