"""Runs the command line in the process of the tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from headgate.cli.main import cli
from headgate.core.event_log import read_log
from headgate.live.event_log import EventLog, Rotation

EXAMPLES = Path(__file__).parents[3] / "examples"
KAAS = str(EXAMPLES / "kaas.yaml")

APP = """
functions: {resnet: {exec_time: 5ms, cold_start: 20ms}, bert: {exec_time: 20ms, memory: 1GB}}
slo: {latency: 100ms}
pools: {gpu: {nodes: 2, memory: 16GB, price: $1.20/h}}
policy: balance
"""


@dataclass(frozen=True)
class Ended:
    """The output of a command, and its exit status."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The output as JSON, without NaN."""
        return json.loads(self.out, parse_constant=_refuse)


def headgate(*arguments: object) -> Ended:
    """Run a command. An exception that is not bad input is passed on."""
    result = CliRunner().invoke(cli, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


def write(path: Path, text: str) -> str:
    """Write a file and return its name."""
    path.write_text(text, encoding="utf-8")
    return str(path)


def rotated(log: Path, *, size_bytes: int = 2_000, keep: int = 1_000) -> Path:
    """Return the same log, as a gateway would have written and rotated it."""
    header, entries = read_log(log)
    path = log.with_name("live.log")
    written = EventLog(path, header, Rotation(size_bytes=size_bytes, keep=keep))
    for entry in entries:
        written.record(entry.now_ns, entry.event, entry.actions)
    written.close()
    return path


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
