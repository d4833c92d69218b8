"""A model: four small verbs around what an ML engineer has anyway.

    load      once, in the worker: weights, sessions, warm-up
    decode    one request's arrays -> what `predict` wants of it
    predict   a whole batch -> a whole batch
    encode    one request's part of that -> its output arrays

All but `predict` have a default. **The one rule:** a request of n items is a *column* of n: an
array with n rows, a list of n, or a dict of such. Headgate joins the columns that `decode` gave for
all requests of a batch, calls `predict` once, and cuts its answer, which is a column for just as
many items, apart for `encode`. A model never sees where one request ends and the next begins, and
its answer must not depend on it.

With `batches = False` the first dimension means nothing: `predict` gets one request at a time.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from headgate.core.errors import ConfigError
from headgate.functions.arrays import Array, dtype_of
from headgate.functions.specs import Declared, read_specs
from headgate.functions.tensor import Signature


class Model:
    """Derive from this, or decorate a plain function with `@function`.

    `inputs` and `outputs` are what clients see and what requests are checked against, as in
    `{"image": "FP32[-1, 3, 64, 64]"}`; without, a model looks at what it is given by itself. They
    may also be set in `load`. Arrays are read-only, and stay as they are for as long as they are
    kept; one that is kept for long takes shared memory from the requests to come: better copy it.
    Only where `concurrency` is above 1 several threads use a model at the same time.
    An output of booleans named `unsure` tells a cascade that a later stage should have a look.

    >>> class Scale(Model):
    ...     inputs = {"x": "FP32[-1, 2]"}
    ...     outputs = {"y": "FP32[-1, 2]"}
    ...
    ...     def load(self):
    ...         self.factor = np.float32(3)
    ...
    ...     def predict(self, batch):
    ...         return {"y": batch["x"] * self.factor}
    >>> model = Scale()
    >>> model.load()
    >>> model.predict({"x": np.float32([[1, 2], [3, 4]])})
    {'y': array([[ 3.,  6.],
           [ 9., 12.]], dtype=float32)}
    """

    inputs: Declared = ()
    outputs: Declared = ()
    batches: bool = True
    platform: ClassVar[str] = "python"

    # `Any` below: what goes from one verb to the next is the model's own business.

    def load(self) -> None:
        """Make ready to predict. Called once, in the worker, before anything else."""

    def decode(self, inputs: dict[str, Array]) -> Any:
        """Return what `predict` wants of one request. What this raises is the client's fault."""
        return inputs

    def predict(self, batch: Any) -> Any:
        """Return the answers for a batch, as a column. What this raises is the model's fault."""
        raise NotImplementedError(f"{type(self).__name__} has no predict")

    def encode(self, result: Any) -> dict[str, Array]:
        """Return the outputs for one request. An array alone is the only output."""
        if isinstance(result, np.ndarray):
            names = [spec.name for spec in read_specs(self.outputs, "outputs")]
            return {names[0] if len(names) == 1 else "output": result}
        outputs: dict[str, Array] = result
        return outputs

    def unload(self) -> None:
        """Give back what `load` took, as far as garbage collection does not."""

    def example(self) -> dict[str, Array] | None:
        """Return the inputs of a request of one item, to measure with; None if nobody knows.

        Zeros, and 1 where a dimension may have any size.
        """
        specs = read_specs(self.inputs, "inputs")
        if not specs:
            return None
        arrays: dict[str, Array] = {}
        for spec in specs:
            array = np.zeros(
                [1 if size < 0 else size for size in spec.shape], dtype_of(spec.datatype)
            )
            if spec.datatype == "BYTES":
                array.fill(b"")
            arrays[spec.name] = array
        return arrays


def signature_of(model: Model) -> Signature:
    """Return what a loaded model takes and gives. Raises `ConfigError` if it says it wrongly."""
    name = type(model).__name__
    inputs = read_specs(model.inputs, f"{name}.inputs")
    outputs = read_specs(model.outputs, f"{name}.outputs")
    if model.batches:
        for spec in (*inputs, *outputs):
            if not spec.shape or spec.shape[0] != -1:
                raise ConfigError(
                    "counts no items in its first dimension",
                    where=name,
                    key=spec.name,
                    value=spec.shape,
                    allowed="-1 there, or batches = False",
                )
    return Signature(inputs, outputs, model.batches, model.platform)
