"""The way in: finds the command, runs it, and decides how the process ends.

0 is fine, 1 is a check that does not hold, 2 is bad input. Bad input is exactly one line on stderr,
whether Headgate or the parser of the command line found it. Any other exception is a defect of
ours and keeps its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

import click

from headgate import __version__
from headgate.cli import commands
from headgate.config.errors import unknown_name_error
from headgate.core.errors import ConfigError

BAD_INPUT: Final = 2
INTERRUPTED: Final = 130  # as a shell reports SIGINT
PIPE_CLOSED: Final = 141  # as a shell reports SIGPIPE
_OUTPUT_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Commands(click.Group):
    """The commands of `headgate.cli.commands`, imported only when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command there is."""
        return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name, if there is one."""
        if cmd_name not in self.list_commands(ctx):
            return None
        found = import_module(f"{commands.__name__}.{cmd_name}").command
        if not isinstance(found, click.Command):
            raise TypeError(f"{commands.__name__}.{cmd_name}.command is not a command")
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments begin with, or say which one was meant."""
        names = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in names and not ctx.resilient_parsing:
            raise unknown_name_error("command", args[0], names, where="", key=None)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; whoever reads the output may leave at any time (`| head`)."""
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
            status = _complain(str(error))
        except click.ClickException as error:
            status = _complain(_usage_problem(error))
        except click.Abort:
            click.echo("headgate: interrupted", err=True)
            status = INTERRUPTED
        except MemoryError:
            status = _complain("this needs more memory than there is")
        except OSError as error:
            if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
                raise  # no doing of stdout, which has no name
            status = _complain(f"the output cannot be written: {error.strerror}")
            _discard_output()
        sys.exit(status if isinstance(status, int) else 0)


@click.command(cls=Commands, invoke_without_command=True)
@click.version_option(__version__, prog_name="headgate", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Simulate and compare policies that schedule ML inference under objectives.

    APP is a YAML file, or module:app for one declared in Python. Exit codes: 0 fine, 1 a check
    does not hold, 2 bad input.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> NoReturn:
    """The entry point `headgate`."""
    if sys.stdout is None:  # as in `headgate schema >&-`
        sys.exit(_complain("the output cannot be written: it is closed"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a µ must not break an ASCII terminal
    cli.main()


def _complain(problem: str) -> int:
    """Say in one line what is wrong with the input."""
    click.echo(f"headgate: error: {' '.join(problem.splitlines())}", err=True)
    return BAD_INPUT


def _discard_output() -> None:
    """Send what is still buffered nowhere, or the interpreter would fail again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_problem(error: click.ClickException) -> str:
    """What click found wrong, after the command it was found in."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    message = error.format_message()
    if context is None or context.parent is None:
        return message
    return f"{context.info_name}: {message} Try: {context.command_path} --help"
