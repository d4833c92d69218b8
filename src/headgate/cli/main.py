"""The entry point `headgate`: finds the command, runs it, and sets the exit status.

Exit status 0 is success, 1 a check that does not hold, 2 bad input. Bad input is reported in one
line on stderr, whether Headgate or the parser of the command line found it. Any other exception is
a defect of Headgate and keeps its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Any, Final, NoReturn

import click

from headgate import __version__
from headgate.cli import commands
from headgate.core.errors import ConfigError, unknown_name_error

BAD_INPUT: Final = 2
INTERRUPTED: Final = 130  # as a shell reports SIGINT
PIPE_CLOSED: Final = 141  # as a shell reports SIGPIPE
_OUTPUT_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Commands(click.Group):
    """The commands of `headgate.cli.commands`; a module is imported only when its command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands: those of the modules, with dashes."""
        modules = pkgutil.iter_modules(commands.__path__)
        return sorted(module.name.replace("_", "-") for module in modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, if there is one."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = f"{commands.__name__}.{cmd_name.replace('-', '_')}"
        command = import_module(module).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.command is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name; an error suggests the closest name."""
        names = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in names and not ctx.resilient_parsing:
            raise unknown_name_error("command", args[0], names, where="", key=None)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; the reader of its output may close the pipe at any time (`| head`)."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _discard_output()
            return PIPE_CLOSED

    def main(  # type: ignore[override]  # never returns, so it needs no standalone mode
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        **extra: Any,
    ) -> NoReturn:
        """Run and exit."""
        extra["standalone_mode"] = False
        try:
            status = super().main(args, "headgate", complete_var, **extra)
        except ConfigError as error:
            status = _print_error(str(error))
        except click.ClickException as error:
            status = _print_error(_usage_problem(error))
        except click.Abort:
            click.echo("headgate: interrupted", err=True)
            status = INTERRUPTED
        except MemoryError:
            status = _print_error("out of memory")
        except OSError as error:
            if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
                raise  # not an error of stdout, which has no file name
            status = _print_error(f"the output cannot be written: {error.strerror}")
            _discard_output()
        sys.exit(status if isinstance(status, int) else 0)


@click.command(cls=Commands, invoke_without_command=True)
@click.version_option(__version__, prog_name="headgate", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve ML models, and simulate and compare scheduling policies under latency objectives.

    APP is a YAML file, module:app for one declared in Python, or a single model.onnx. Exit status:
    0 success, 1 a check does not hold (of `load`: no request had a result), 2 bad input.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> NoReturn:
    """Run `headgate` and exit."""
    if sys.stdout is None:  # as in `headgate schema >&-`
        sys.exit(_print_error("the output cannot be written: stdout is closed"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a µ must not break an ASCII terminal
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # else it is ignored, as by nohup
            signal.signal(number, _terminate)
    cli.main()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Exit as a shell reports the signal, but end first what the command has started.

    A demonstration or a benchmark runs servers, which would go on otherwise. A command that is a
    server itself has a handler of its own.
    """
    sys.exit(128 + number)


def _print_error(problem: str) -> int:
    """Report bad input in one line; return the exit status."""
    with suppress(OSError):  # a full disk: the status is all that is left
        click.echo(f"headgate: error: {' '.join(problem.splitlines())}", err=True)
    return BAD_INPUT


def _discard_output() -> None:
    """Redirect stdout to the null device, or flushing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_problem(error: click.ClickException) -> str:
    """Return click's message, preceded by the command it is about."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    message = error.format_message()
    if context is None or context.parent is None:
        return message
    return f"{context.info_name}: {message} Try: {context.command_path} --help"
