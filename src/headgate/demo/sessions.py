"""The recommender, asked for the same number of sessions in every request."""

from __future__ import annotations

from headgate.functions.onnx_model import OnnxModel
from headgate.functions.specs import Declared, read_specs
from headgate.functions.tensor import TensorSpec


class Sessions(OnnxModel):
    """An ONNX file of which a request wants so many rows, which are one piece of work.

    So a request takes as long as its sender likes, and there is nothing to put together.
    """

    def __init__(self, path: str, sessions: int) -> None:
        super().__init__(path)
        self._sessions = sessions

    def load(self) -> None:
        """Read the file. Raises `ConfigError` if that cannot be done."""
        super().load()
        self.inputs = self._fixed(self.inputs)
        self.outputs = self._fixed(self.outputs)
        self.batches = False

    def _fixed(self, declared: Declared) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(spec.name, spec.datatype, (self._sessions, *spec.shape[1:]))
            for spec in read_specs(declared, "recommender")
        )
