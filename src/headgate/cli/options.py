"""The options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import yaml

from headgate.core.errors import ConfigError
from headgate.core.units import parse_duration

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


class OutputPath(click.Path):
    """Where something is to be written: anything but an empty name."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a path."""
        if value == "":
            self.fail("the name is empty.", param, ctx)
        return super().convert(value, param, ctx)


def duration_ns(text: str) -> int:
    """Read a number of seconds, or a time with its unit; more than zero.

    >>> duration_ns("90") == duration_ns("1.5min")
    True
    """
    is_bare = _NUMBER.fullmatch(text) is not None
    value_ns = parse_duration(f"{text}s" if is_bare else text, where="--duration")
    if value_ns == 0:
        raise ConfigError("must be longer than zero", where="--duration", value=text)
    return value_ns


def assumed_ns(text: str) -> int:
    """Read a time with its unit; more than zero."""
    value_ns = parse_duration(text, where="--assume-exec-time")
    if value_ns == 0:
        raise ConfigError("must be longer than zero", where="--assume-exec-time", value=text)
    return value_ns


def setting(text: str) -> tuple[str, object]:
    """Read `KEY=VALUE`, the value as it would stand in the YAML file.

    >>> setting("batch_max=4"), setting("patience=1e3")
    (('batch_max', 4), ('patience', 1000.0))
    """
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError("is not a setting", where="--set", value=text, allowed="KEY=VALUE")
    try:
        read = yaml.safe_load(value)
        if isinstance(read, str) and _NUMBER.fullmatch(value):  # to YAML 1.1, 1e3 is text
            read = float(value)
        return key, read
    except (yaml.YAMLError, ValueError):
        raise ConfigError("is not YAML", where="--set", key=key, value=value) from None


def app_argument(command: CommandT) -> CommandT:
    """Take APP."""
    return click.argument("app")(command)


def json_option(command: CommandT) -> CommandT:
    """Take --json."""
    return click.option("as_json", "--json", is_flag=True, help="Print JSON.")(command)


def policy_option(command: CommandT) -> CommandT:
    """Take --policy."""
    text = "Which policy decides. Default: the one of APP. See: headgate policies."
    return click.option("--policy", metavar="NAME", help=text)(command)


def set_option(help: str) -> Callable[[CommandT], CommandT]:
    """Take --set, which may be given more than once."""
    return click.option(
        "settings", "--set", type=setting, multiple=True, metavar="KEY=VALUE", help=help
    )


def seed_option(command: CommandT) -> CommandT:
    """Take --seed."""
    return click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="The same seed gives the same result. Default: 0.",
    )(command)


def workload_options(command: CommandT) -> CommandT:
    """Take what says which requests are sent: the fields of `WorkloadOptions`."""
    options = (
        click.option("--trace", metavar="FILE", help="Requests from a trace: CSV or Parquet."),
        click.option(
            "--arrivals",
            multiple=True,
            metavar="SPEC",
            help="Requests made up, such as poisson:rate=50/s,pipeline=NAME. May be repeated.",
        ),
        click.option(
            "duration_ns",
            "--duration",
            type=duration_ns,
            metavar="S",
            help="Arrivals stop then: seconds, or 10min. Default: as APP says, or all the trace.",
        ),
        click.option("--sort", is_flag=True, help="Put the rows of an unsorted trace in order."),
        traces_option,
    )
    return reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def assume_exec_option(command: CommandT) -> CommandT:
    """Take --assume-exec-time."""
    return click.option(
        "assumed_ns",
        "--assume-exec-time",
        type=assumed_ns,
        metavar="TIME",
        help="Take batches of functions that nobody has measured to run for so long, such as 10ms.",
    )(command)


def traces_option(command: CommandT) -> CommandT:
    """Take --traces."""
    return click.option(
        "--traces",
        envvar="HEADGATE_TRACES",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Where traces are looked for by name. Default: $HEADGATE_TRACES.",
    )(command)


def report_option(command: CommandT) -> CommandT:
    """Take --report."""
    return click.option(
        "--report",
        type=OutputPath(),
        metavar="DIR",
        help="Write a page, plots and data there.",
    )(command)


# Files that a command writes: what prevents it is the user's to mend, so it is one line.


@contextmanager
def writing(path: Path | None, option: str) -> Iterator[None]:
    """Turn a failure to write at `path` into a `ConfigError` that names the option."""
    try:
        yield
    except OSError as error:
        if path is None or isinstance(error, BrokenPipeError):
            raise  # not the doing of this option
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError(problem, where=option, value=str(error.filename or path)) from None


def check_not_read(path: Path | None, option: str, read: Iterable[Path]) -> None:
    """Refuse to write over a file that the command reads."""
    for other in read:
        if path is not None and path.exists() and other.exists() and path.samefile(other):
            problem = "would be written over, and it is read"
            raise ConfigError(problem, where=option, value=str(path), allowed="another file")


def make_directory(path: Path, option: str) -> None:
    """Make a directory, now rather than after a long run."""
    with writing(path, option):
        path.mkdir(parents=True, exist_ok=True)
