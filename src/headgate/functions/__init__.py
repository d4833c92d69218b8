"""Functions: what users write, and how arrays come to it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headgate.functions.model import Model, function
    from headgate.functions.onnx_model import OnnxModel
    from headgate.functions.tensor import TensorSpec

__all__ = ["Model", "OnnxModel", "TensorSpec", "function"]

_HOMES: Final = {
    "Model": "model",
    "OnnxModel": "onnx_model",
    "TensorSpec": "tensor",
    "function": "model",
}


def __getattr__(name: str) -> object:
    """Import on first use: a gateway needs tensors, and not the NumPy behind models."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
