"""The options that several commands share, and the kinds of value they take."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from headgate.core.errors import ConfigError
from headgate.core.units import parse_duration

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class Duration(click.ParamType[int]):
    """A time with a unit, or a number of seconds; in nanoseconds, and more than zero."""

    name = "seconds"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read `90`, `1.5min`."""
        where = param.opts[0] if param is not None else None
        text = str(value).strip()
        has_unit = not text.replace(".", "", 1).lstrip("-").isdecimal()
        duration_ns = parse_duration(text if has_unit else f"{text}s", where=where)
        if duration_ns == 0:
            raise ConfigError("must be longer than zero", where=where, value=value)
        return duration_ns


class Setting(click.ParamType[tuple[str, object]]):
    """`KEY=VALUE`, the value written as in the YAML file."""

    name = "key=value"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, object]:
        """Read `batch_max=4`."""
        key, equals, text = str(value).partition("=")
        where = param.opts[0] if param is not None else None
        if not key or not equals:
            raise ConfigError("is not a setting", where=where, value=value, allowed="KEY=VALUE")
        try:
            return key, yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            raise ConfigError("is not YAML", where=where, key=key, value=text) from None


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
        "settings", "--set", type=Setting(), multiple=True, metavar="KEY=VALUE", help=help
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
            type=Duration(),
            metavar="S",
            help="Arrivals stop then: seconds, or 10min. Default: as APP says, or all the trace.",
        ),
        click.option("--sort", is_flag=True, help="Put the rows of an unsorted trace in order."),
        traces_option,
    )
    return reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


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
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Write a page, plots and data there.",
    )(command)
