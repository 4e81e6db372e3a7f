"""Errors that a user can act on; the command line shows them as one sentence."""


class ConfigurationError(ValueError):
    """A setting that cannot work, found before anything is sampled or trained.

    The message names the field, the value it had and what would be right.
    """


class TrainingError(RuntimeError):
    """Training cannot go on: its numbers keep being no numbers. The weights are those of the last sound step."""


class RolloutError(RuntimeError):
    """Rollouts cannot go on: environments or the engine keep failing. Nothing of the failure was trained."""
