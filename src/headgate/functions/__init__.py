"""Functions: the models that users write, and the conversion of tensors to their arrays."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headgate.functions.model import Model, OnnxModel, function
    from headgate.functions.tensor import TensorSpec

__all__ = ["Model", "OnnxModel", "TensorSpec", "function"]

_HOMES: Final = {
    "Model": "model",
    "OnnxModel": "model",
    "TensorSpec": "tensor",
    "function": "model",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: a gateway needs tensors, but not NumPy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
