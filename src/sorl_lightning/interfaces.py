"""Abstract base classes that a class may also satisfy by its shape."""

from __future__ import annotations

from abc import ABC
from typing import Any


class Interface(ABC):
    """What ``typing.Protocol`` is to a type checker, for YAML: deriving from it is optional.

    A class with all abstract methods of an interface counts as a subclass, whatever it inherits from and however it is
    annotated. (For protocols, the YAML parser demands the very same annotations.)
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        required: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
        if not required:
            return NotImplemented
        return all(hasattr(other, name) for name in required) or NotImplemented
