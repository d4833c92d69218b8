"""`headgate lambda-local`: runs the Lambda emulator in the foreground until a signal ends it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Final

import click

from headgate.cli.options import OutputPath
from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.units import parse_duration
from headgate.lambda_emulator import EmbeddedPlatform, PlatformSettings, gb_s
from headgate.lambda_emulator.settings import CpuMode

_EXPORTED: Final[Mapping[str, str]] = {
    "AWS_ACCESS_KEY_ID": "aws_access_key_id",
    "AWS_SECRET_ACCESS_KEY": "aws_secret_access_key",
    "AWS_ENDPOINT_URL_LAMBDA": "endpoint_url",
    "AWS_DEFAULT_REGION": "region_name",
}


@click.command("lambda-local")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=9_001,
    show_default=True,
    help="Port of the API. 0: any free port.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--allow-host",
    "allow_hosts",
    metavar="NAME",
    multiple=True,
    help="A host name that clients use for the emulator, such as that of a container.",
)
@click.option(
    "--keys-file",
    type=OutputPath(),
    help="File to write the access keys to. Default: ~/.local/state/headgate/platform-PORT.json",
)
@click.option(
    "--no-auth",
    is_flag=True,
    help="Accept unsigned requests: every user of this machine may run code.",
)
@click.option(
    "--directory",
    type=OutputPath(),
    default=Path("platform"),
    show_default=True,
    help="Directory for the code of functions, their logs and the billing log.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 100_000),
    default=1_000,
    show_default=True,
    help="Most instances of all functions at once; more calls are throttled.",
)
@click.option(
    "--keep-alive",
    metavar="TIME",
    default="10min",
    show_default=True,
    help="Time that an idle instance is kept.",
)
@click.option(
    "--age-max",
    metavar="TIME",
    default="2h",
    show_default=True,
    help="Age from which on an instance is not used again.",
)
@click.option(
    "--cpu",
    type=click.Choice(("auto", "cgroup", "affinity", "none")),
    default="auto",
    show_default=True,
    help="How the CPU of an instance is limited by its memory.",
)
@click.option("--cpus", metavar="LIST", help="CPUs that instances may run on, such as 0,1.")
def command(
    port: int,
    host: str,
    allow_hosts: tuple[str, ...],
    keys_file: Path | None,
    no_auth: bool,
    directory: Path,
    concurrency: int,
    keep_alive: str,
    age_max: str,
    cpu: CpuMode,
    cpus: str | None,
) -> None:
    """Emulate AWS Lambda on this machine, for boto3 and any other client of its API.

    Requests must be signed. The keys are made at start, printed, and written to a file that
    `headgate deploy` and `headgate serve` read. The variables HEADGATE_PLATFORM_ACCESS_KEY_ID and
    HEADGATE_PLATFORM_SECRET_ACCESS_KEY set them instead.

    \b
    headgate lambda-local --port 9001 --directory functions --concurrency 10
    headgate deploy lambda app.yaml --function f --endpoint-url http://127.0.0.1:9001
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError("is not a directory", where=str(directory), key="--directory")
    settings = PlatformSettings(
        concurrency=concurrency,
        keep_alive_s=_seconds(keep_alive, "--keep-alive"),
        age_max_s=_seconds(age_max, "--age-max"),
        cpu=cpu,
        cpus=_cpus(cpus),
    )
    end = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        end.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    with EmbeddedPlatform(
        directory,
        host=host,
        port=port,
        settings=settings,
        has_auth=not no_auth,
        allow_hosts=allow_hosts,
        keys_file=keys_file,
    ) as platform:
        _print_access(platform, directory)
        end.wait()
    records = platform.billing_log.records()
    click.echo(f"{len(records)} calls, {gb_s(records):.3f} GB-s")


def _print_access(platform: EmbeddedPlatform, directory: Path) -> None:
    click.echo(f"platform {platform.url}  (CPU: {platform.cpu}; Ctrl-C ends it)")
    options = platform.client_options
    for name, key in _EXPORTED.items():
        click.echo(f"export {name}={quote(options[key])}")
    if platform.keys_file is None:
        click.echo("  keys: any, because of --no-auth")
    else:
        click.echo(f"  keys: {platform.keys_file}")
    click.echo(f"  billing log: {directory / platform.billing_log.path.name}")


def _seconds(text: str, option: str) -> float:
    duration_ns = parse_duration(text, where=option)
    if duration_ns == 0:
        raise ConfigError("must be longer than zero", where=option, value=text)
    return duration_ns / SECOND_NS


def _cpus(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    names = text.split(",")
    if not all(name.strip().isdecimal() for name in names):
        raise ConfigError("is not a list of CPUs", where="--cpus", value=text, allowed="0,1")
    return tuple(int(name) for name in names)
