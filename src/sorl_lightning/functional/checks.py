"""Arguments that cannot work, refused with their name, their value and what is allowed."""

from __future__ import annotations

import math
from typing import Any, get_args

from torch import Tensor

Number = float | int  # as static checkers read float; run-time checkers are stricter


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a ``value`` that is not one of the ``Literal`` type ``choices``."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def check_range(name: str, value: Number, low: Number, high: Number) -> None:
    """Refuse a ``value`` outside [``low``, ``high``], NaN included."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value!r}")


def check_positive(name: str, value: Number) -> None:
    """Refuse a ``value`` that is not a finite number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


def check_count(name: str, value: int, least: int = 1) -> None:
    """Refuse a ``value`` below ``least``."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")


def check_same_shape(**tensors: Tensor | None) -> None:
    """Refuse tensors of different shapes; those that are None are left out."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError("shapes must agree, got " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
