"""Builds the model of a function: from an ONNX file, or from a class in a Python module."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path
from typing import Protocol

from headgate.config.options import VariantSource
from headgate.core.errors import ConfigError
from headgate.core.model import App, Variant
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.error_text import error_text
from headgate.functions.model import Model, OnnxModel, function


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


def load_runner(
    app: App, sources: Sequence[VariantSource | None], base: str, variant: Variant
) -> BatchRunner:
    """Build and load a model. Raises whatever the model raises."""
    source = sources[variant.id]
    if source is None:
        raise ConfigError("has neither model nor code", where=variant.name)
    model = build_model(source, base, variant.name)
    model.load()
    is_idempotent = app.functions[variant.function_id].is_idempotent
    return BatchRunner(variant.name, model, is_idempotent=is_idempotent)


def build_model(source: FunctionSource, base: str, where: str) -> Model:
    """Return the model, not yet loaded. Modules are searched in the directory `base` first.

    Raises `ConfigError`, naming `where`, if it cannot be built.
    """
    if source.code is not None:
        model = _import_class(source.code, base, where)
        return _instantiate(model, source.options, source.code, where)
    if source.model is None:
        raise ConfigError("has neither model nor code", where=where)
    options = {"path": Path(base, source.model), **source.options}
    return _instantiate(OnnxModel, options, source.model, where)


def _import_class(code: str, base: str, where: str) -> type[Model]:
    module_name, _, path = code.partition(":")
    names = [*module_name.split("."), *path.split(".")]
    if not all(name.isidentifier() for name in names):
        problem, allowed = "is not the name of a class", "module:Class"
        raise ConfigError(problem, where=where, key="code", value=code, allowed=allowed)
    if base not in sys.path:
        sys.path.insert(0, base)
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
