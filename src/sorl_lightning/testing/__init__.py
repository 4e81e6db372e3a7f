"""Stand-ins for what takes minutes to start. They show what a trainer does with answers, not what servers answer."""

from sorl_lightning.testing.fake_vllm import FakeVLLM, Fault

__all__ = ["FakeVLLM", "Fault"]
