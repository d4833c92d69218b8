"""Command-line options that several commands share, their parsers, and output files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from math import isnan
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import yaml

from headgate.core.errors import ConfigError
from headgate.core.model import ENFORCE, OBSERVE
from headgate.core.units import parse_duration

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


class OutputPath(click.Path):
    """The path of a file to write: any name that is not empty."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the name is empty.", param, ctx)
        return super().convert(value, param, ctx)


class Milliseconds(click.FloatRange):
    """A duration as a number of milliseconds, above zero and up to a day."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=86_400_000)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if isnan(number):  # which compares with no bound
            self.fail(f"{value} is not a number.", param, ctx)
        return number


def duration_ns(text: str) -> int:
    """Parse a duration above zero: a number of seconds, or a number with a unit.

    >>> duration_ns("90") == duration_ns("1.5min")
    True
    """
    is_bare = _NUMBER.fullmatch(text) is not None
    value_ns = parse_duration(f"{text}s" if is_bare else text, where="--duration")
    if value_ns == 0:
        problem = "must be longer than zero"
        raise ConfigError(problem, where="--duration", value=text, allowed="10, 500ms, 10min")
    return value_ns


def duration_option(
    name: str, option: str, help: str, *, default: str | None = None, metavar: str = "TIME"
) -> Callable[[CommandT], CommandT]:
    """Return an option that takes a duration above zero, with its unit."""

    def read(text: str) -> int:
        value_ns = parse_duration(text, where=option)
        if value_ns == 0:
            problem = "must be longer than zero"
            raise ConfigError(problem, where=option, value=text, allowed="200ms, 60s")
        return value_ns

    return click.option(name, option, type=read, default=default, metavar=metavar, help=help)


def setting(text: str) -> tuple[str, object]:
    """Parse `KEY=VALUE`, the value as it would be written in the YAML file.

    >>> setting("batch_max=4"), setting("patience=1e3")
    (('batch_max', 4), ('patience', 1000.0))
    """
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError("is not a setting", where="--set", value=text, allowed="KEY=VALUE")
    try:
        parsed = yaml.safe_load(value)
        if isinstance(parsed, str) and _NUMBER.fullmatch(value):  # in YAML 1.1, 1e3 is text
            parsed = float(value)
        return key, parsed
    except (yaml.YAMLError, ValueError):
        raise ConfigError("is not YAML", where="--set", key=key, value=value) from None


def set_option(help: str) -> Callable[[CommandT], CommandT]:
    """Return the option --set, which may be repeated."""
    return click.option(
        "settings", "--set", type=setting, multiple=True, metavar="KEY=VALUE", help=help
    )


def gateways_option(help: str) -> Callable[[CommandT], CommandT]:
    """Return the option --gateways of a simulation."""
    number = click.IntRange(1, 64)
    return click.option("--gateways", type=number, default=1, show_default=True, help=help)


app_argument: Final = click.argument("app")
json_option: Final = click.option("as_json", "--json", is_flag=True, help="Print JSON.")
policy_option: Final = click.option(
    "--policy",
    metavar="NAME",
    help="Scheduling policy. Default: the policy of APP. See: headgate policies.",
)
admission_option: Final = click.option(
    "--admission",
    type=click.Choice((ENFORCE, OBSERVE)),
    help="Reject what the policy rejects, or only count it. Default: as in APP, or enforce.",
)
seed_option: Final = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Random seed; the same seed gives the same result. Default: 0.",
)
assume_exec_option: Final = duration_option(
    "assumed_ns",
    "--assume-exec-time",
    "Execution time to assume for batches of functions that nobody has measured: 10ms.",
)
traces_option: Final = click.option(
    "--traces",
    envvar="HEADGATE_TRACES",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory in which traces are found by name. Default: $HEADGATE_TRACES.",
)
report_option: Final = click.option(
    "--report",
    type=OutputPath(),
    metavar="DIR",
    help="Write a report to this directory: HTML page, plots and data.",
)


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """The options that select the workload."""

    trace: str | None = None
    arrivals: tuple[str, ...] = ()
    duration_ns: int | None = None
    sort: bool = False  # accept a trace that is not in order of time
    traces: Path | None = None  # a directory


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select the workload: one parameter, `workload_options`."""

    @click.option("--trace", metavar="FILE", help="Replay the requests of a trace: CSV or Parquet.")
    @click.option(
        "--arrivals",
        multiple=True,
        metavar="PROCESS",
        help="Generate requests, such as poisson:rate=50/s,pipeline=NAME. May be repeated.",
    )
    @click.option(
        "duration_ns",
        "--duration",
        type=duration_ns,
        metavar="S",
        help="When arrivals stop: seconds, or 10min. Default: as in APP, or the whole trace.",
    )
    @click.option(
        "--sort", is_flag=True, help="Sort the rows of a trace that is not in order of time."
    )
    @traces_option
    @wraps(command)
    def collect(**values: Any) -> Any:
        own = {field.name: values.pop(field.name) for field in fields(WorkloadOptions)}
        return command(**values, workload_options=WorkloadOptions(**own))

    return collect


@contextmanager
def writing(path: Path | None, option: str) -> Iterator[None]:
    """Turn a failure to write `path` into a `ConfigError` that names the option."""
    try:
        yield
    except OSError as error:
        if path is None or isinstance(error, BrokenPipeError):
            raise  # not caused by this option
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError(problem, where=option, value=str(error.filename or path)) from None


def check_not_read(path: Path | None, option: str, read: Iterable[Path]) -> None:
    """Refuse to overwrite a file that the command reads."""
    for other in read:
        if path is not None and path.exists() and other.exists() and path.samefile(other):
            problem = "is an input of the command and would be overwritten"
            raise ConfigError(problem, where=option, value=str(path), allowed="another file")


def make_directory(path: Path | None, option: str) -> None:
    """Make a directory, if one is given, before a long run rather than after it."""
    with writing(path, option):
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
