"""Builds the model of a function: from an ONNX file, or from a class in a Python module.

The CPUs of a shape become threads here. A model whose constructor takes `threads`, as that of an
ONNX file does, is built once for each number of cores that its batches may have: the threads of
such a model exist as long as it does, and none of them can be lent to another batch. Any other
model is built once, for all numbers of cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import isclass, isfunction, signature
from pathlib import Path
from typing import Final, Protocol, final

from headgate.config.options import VariantSource
from headgate.core.errors import ConfigError, error_text
from headgate.core.model import App, Variant
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.model import FunctionModel, Model, OnnxModel, function
from headgate.functions.source_modules import search_first

_THREADS: Final = "threads"  # the parameter of models that are told their number of threads
ALL_CORES: Final = 0  # of the process: batches whose shape declares no CPUs


class FunctionSource(Protocol):
    """The source of a function in an application file."""

    @property
    def model(self) -> str | None:
        """The path of an ONNX file, relative to the directory of the application."""

    @property
    def code(self) -> str | None:
        """A class or a function: "module:Class"."""

    @property
    def options(self) -> Mapping[str, object]:
        """Keyword arguments of the class."""


@final
class LoadedFunction:
    """A loaded function: by the number of cores of a batch, what runs the batch."""

    def __init__(self, runners: Mapping[int, BatchRunner]) -> None:
        self._runners = dict(runners)

    @property
    def runner(self) -> BatchRunner:
        """The first runner. All have the same signature."""
        return next(iter(self._runners.values()))

    @property
    def core_counts(self) -> tuple[int, ...]:
        return tuple(self._runners)

    def on(self, cores: int) -> BatchRunner:
        """Return the runner of batches on one of the numbers of cores that were loaded for."""
        return self._runners[cores]

    def unload(self) -> None:
        """Unload all models. Nothing may run on them any more."""
        for runner in dict.fromkeys(self._runners.values()):
            runner.unload()


def load_function(
    app: App,
    sources: Sequence[VariantSource | None],
    base: str,
    variant: Variant,
    core_counts: Sequence[int] = (ALL_CORES,),
) -> LoadedFunction:
    """Build and load the models of a function. Raises whatever a model raises.

    If one of them cannot be loaded, those before it are unloaded.
    """
    source = sources[variant.id]
    if source is None:
        raise ConfigError("has neither model nor code", where=variant.name)
    takes_threads = any(core_counts) and _takes_threads(source, base, variant.name)
    runners: dict[int, BatchRunner] = {}
    try:
        for cores in core_counts:
            if runners and not takes_threads:
                runners[cores] = runners[core_counts[0]]
                continue
            model = build_model(source, base, variant.name, cores)
            model.load()
            is_idempotent = app.functions[variant.function_id].is_idempotent
            runners[cores] = BatchRunner(variant.name, model, is_idempotent=is_idempotent)
    except BaseException:
        LoadedFunction(runners).unload()
        raise
    return LoadedFunction(runners)


def load_runner(
    app: App,
    sources: Sequence[VariantSource | None],
    base: str,
    variant: Variant,
    cores: int = ALL_CORES,
) -> BatchRunner:
    """Build and load a model for batches of one shape. Raises whatever the model raises."""
    return load_function(app, sources, base, variant, (cores,)).runner


def build_model(source: FunctionSource, base: str, where: str, cores: int = ALL_CORES) -> Model:
    """Return the model for batches on this number of cores, not yet loaded.

    Modules are searched in the directory `base` first. Raises `ConfigError`, naming `where`, if it
    cannot be built.
    """
    model, options = _model_class(source, base, where), dict(source.options)
    if cores and _takes_threads(source, base, where):
        options[_THREADS] = cores
    if source.code is not None:
        return _instantiate(model, options, source.code, where)
    assert source.model is not None
    return _instantiate(model, {"path": Path(base, source.model), **options}, source.model, where)


def _model_class(source: FunctionSource, base: str, where: str) -> type[Model]:
    if source.code is not None:
        return _import_class(source.code, base, where)
    if source.model is None:
        raise ConfigError("has neither model nor code", where=where)
    return OnnxModel


def _takes_threads(source: FunctionSource, base: str, where: str) -> bool:
    """Whether a model is to be told its number of threads: it can be, and no option says it."""
    model = _model_class(source, base, where)
    if _THREADS in source.options:
        return False
    if issubclass(model, FunctionModel):
        return _THREADS in model.option_names
    return _THREADS in signature(model).parameters


def _import_class(code: str, base: str, where: str) -> type[Model]:
    module_name, _, path = code.partition(":")
    names = [*module_name.split("."), *path.split(".")]
    if not all(name.isidentifier() for name in names):
        problem, allowed = "is not the name of a class", "module:Class"
        raise ConfigError(problem, where=where, key="code", value=code, allowed=allowed)
    search_first(base)
    try:
        target: object = import_module(module_name)
        for name in path.split("."):
            target = getattr(target, name)
    except (Exception, SystemExit) as error:  # a module may raise anything on import
        problem = f"cannot be imported: {error_text(error)}"
        raise ConfigError(problem, where=where, key="code", value=code) from error
    if isclass(target) and issubclass(target, Model):
        return target
    if isfunction(target):
        return function(target)
    problem = "is neither a Model nor a function"
    allowed = "a subclass of headgate.functions.Model, or a function"
    raise ConfigError(problem, where=where, key="code", value=code, allowed=allowed)


def _instantiate(cls: type[Model], options: Mapping[str, object], value: str, where: str) -> Model:
    try:
        return cls(**options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        problem = f"cannot be created: {error_text(error)}"
        raise ConfigError(problem, where=where, key="options", value=value) from error
