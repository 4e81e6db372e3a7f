"""Stable off-policy RL (SORL) and turn-aware on-policy distillation (TurnOPD) for multi-turn LLM agents."""

__version__ = "0.1.0"
