"""Figures do not depend on how a batch was split."""

from __future__ import annotations

import torch

from sorl_lightning.tally import Tally


def test_means_are_of_tokens_and_not_of_micro_batches() -> None:
    """One token of loss 4 and three of loss 0: mean 1, not the 2 of a mean of means."""
    tally = Tally()
    for values in ([4.0], [0.0, 0.0, 0.0]):
        tensor = torch.tensor(values)
        tally.add_mean("loss", tensor, torch.ones_like(tensor, dtype=torch.bool))
        tally.add("sum", tensor.sum())
        tally.add_maximum("max", tensor, tensor >= 0)
    assert {name: float(value) for name, value in tally.flush().items()} == {"loss": 1.0, "sum": 4.0, "max": 4.0}
    assert tally.flush() == {}


def test_nothing_to_average_is_zero_and_finite() -> None:
    tally = Tally()
    tally.add_mean("loss", torch.tensor([float("nan")]), torch.tensor([False]))
    tally.add_maximum("max", torch.tensor([float("nan")]), torch.tensor([False]))
    assert {name: float(value) for name, value in tally.flush().items()} == {"loss": 0.0}
