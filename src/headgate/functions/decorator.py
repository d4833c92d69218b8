"""A plain Python function on arrays as a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, overload

from headgate.core.errors import ConfigError
from headgate.functions.arrays import Array
from headgate.functions.model import Model
from headgate.functions.specs import Declared, read_specs

Plain: TypeAlias = Callable[..., Any]  # arrays in, an array or a dict or a tuple of them out


@overload
def function(plain: Plain, /) -> type[PlainModel]: ...


@overload
def function(
    *, inputs: Declared = (), outputs: Declared = (), batches: bool = True
) -> Callable[[Plain], type[PlainModel]]: ...


def function(
    plain: Plain | None = None,
    /,
    *,
    inputs: Declared = (),
    outputs: Declared = (),
    batches: bool = True,
) -> type[PlainModel] | Callable[[Plain], type[PlainModel]]:
    """Turn a function into a `Model`: its parameters are the inputs, by name.

    It returns the only output, or several as a dict or in the order of `outputs`. Parameters
    beyond the declared inputs are options: the application file may set them.

    >>> @function(inputs={"x": "FP32[-1]"}, outputs={"y": "FP32[-1]"})
    ... def scaled(x, factor=2):
    ...     return x * factor
    >>> import numpy as np
    >>> scaled(factor=3).predict({"x": np.float32([1, 2])})
    {'y': array([3., 6.], dtype=float32)}
    """
    if plain is None:
        return lambda plain: _model_of(plain, inputs, outputs, batches)
    return _model_of(plain, inputs, outputs, batches)


class PlainModel(Model):
    """A function as a model. `@function` fills in the rest."""

    plain: ClassVar[Plain]
    input_names: ClassVar[frozenset[str]]
    option_names: ClassVar[tuple[str, ...]]
    output_names: ClassVar[tuple[str, ...]]
    takes_any: ClassVar[bool]  # whatever a request calls its inputs

    def __init__(self, **options: object) -> None:
        for name in options:
            if name not in self.option_names:
                raise ConfigError(
                    "is no option of it",
                    where=type(self).__name__,
                    key=name,
                    allowed=", ".join(self.option_names) or "none",
                )
        self._options = options

    def decode(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the inputs, if they are those that the function takes."""
        if not self.takes_any and inputs.keys() != self.input_names:
            given, wanted = ", ".join(inputs), ", ".join(sorted(self.input_names))
            raise ValueError(f"takes the inputs {wanted}; got {given or 'none'}")
        return inputs

    def predict(self, batch: dict[str, Array]) -> object:
        """Call the function."""
        return _named(type(self).plain(**batch, **self._options), self.output_names)


def _model_of(plain: Plain, inputs: Declared, outputs: Declared, batches: bool) -> type[PlainModel]:
    name = plain.__name__
    declared = [spec.name for spec in read_specs(inputs, f"{name}: inputs")]
    input_names, option_names, takes_any = _parameters(plain, declared)
    members = {
        "__doc__": plain.__doc__,
        "__module__": plain.__module__,
        "inputs": inputs,
        "outputs": outputs,
        "batches": batches,
        "plain": staticmethod(plain),
        "input_names": input_names,
        "option_names": option_names,
        "output_names": tuple(spec.name for spec in read_specs(outputs, f"{name}: outputs")),
        "takes_any": takes_any,
    }
    return type(name, (PlainModel,), members)


def _parameters(plain: Plain, declared: list[str]) -> tuple[frozenset[str], tuple[str, ...], bool]:
    """Return the names of inputs, those of options, and whether any input may be given."""
    parameters = inspect.signature(plain).parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    needed = declared or [p.name for p in by_name if p.default is p.empty]
    missing = [p.name for p in by_name if p.default is p.empty and p.name not in needed]
    unknown = set(needed) - {p.name for p in by_name}
    if missing or (unknown and not takes_any):
        raise ConfigError(
            "must have just its inputs as parameters without a default",
            where=plain.__name__,
            value=[p.name for p in by_name],
            allowed=", ".join(needed),
        )
    options = tuple(p.name for p in by_name if p.name not in needed)
    return frozenset(needed), options, takes_any


def _named(result: object, names: tuple[str, ...]) -> object:
    if isinstance(result, dict):
        return result
    if not isinstance(result, tuple):
        return {names[0] if len(names) == 1 else "output": result}
    if len(result) != len(names):
        raise ValueError(f"returned {len(result)} outputs, declared are {len(names)}")
    return dict(zip(names, result, strict=True))
