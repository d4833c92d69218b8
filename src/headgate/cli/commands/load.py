"""`headgate load`: sends open-loop or closed-loop load to a server and reports latencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import click
from rich.console import RenderableType
from rich.text import Text

from headgate.cli.options import (
    Milliseconds,
    WorkloadOptions,
    json_option,
    make_directory,
    report_option,
    seed_option,
    traces_option,
    writing,
)
from headgate.cli.options import duration_ns as read_duration
from headgate.cli.output import Progress, show, show_json
from headgate.cli.workload import TRACE, read_process
from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.states import OUTCOME_NAMES
from headgate.loadgen.loops import run_closed_loop, run_open_loop
from headgate.loadgen.requests import CONNECTIONS_MAX, LoadOptions, read_body
from headgate.loadgen.results import LoadProgress, LoadResult, LoadSummary, summarise_load
from headgate.metrics.format import ms, per_second
from headgate.metrics.report import write_report
from headgate.metrics.table import Fields, ReportTable, field_columns, format_column
from headgate.workload import Arrivals, ClosedLoop, mix

_DURATION_NS: Final = 10 * SECOND_NS
_AUTO: Final = "auto"
_LATENCIES: Final[Fields] = (
    ("mean", "time_ms", "mean_ms"),
    ("p50", "time_ms", "p50_ms"),
    ("p90", "time_ms", "p90_ms"),
    ("p99", "time_ms", "p99_ms"),
    ("p99.9", "time_ms", "p999_ms"),
)


def header(text: str) -> tuple[str, str]:
    """Parse `NAME: VALUE`."""
    name, colon, value = (part.strip() for part in text.partition(":"))
    if not name or not colon:
        raise ConfigError("is not a header", where="--header", value=text, allowed="NAME: VALUE")
    return name, value


@click.command("load")
@click.argument("url")
@click.option(
    "--arrivals",
    multiple=True,
    metavar="PROCESS",
    help="Arrival process, such as poisson:rate=50/s,pipeline=MODEL. May be repeated.",
)
@click.option(
    "--trace", metavar="FILE", help="Replay the arrival times of a trace: CSV or Parquet."
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    metavar="N",
    help="Closed loop instead: N clients, each waiting for a response before its next request. It"
    " finds the throughput of a server, but hides queueing, so do not trust its latencies.",
)
@click.option(
    "duration_ns",
    "--duration",
    type=read_duration,
    metavar="S",
    help="When requests stop: seconds, or 10min. Default: 10 s, or the whole trace.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="Model that the requests are for. Default: the pipeline of each request.",
)
@click.option(
    "--payload",
    default=_AUTO,
    metavar="FILE",
    help="File with the request body. Default: auto, random tensors by the model's metadata.",
)
@click.option("is_binary", "--binary", is_flag=True, help="Send tensors as raw bytes, not as JSON.")
@click.option(
    "headers",
    "--header",
    type=header,
    multiple=True,
    metavar="LINE",
    help="A header to send: NAME: VALUE. May be repeated.",
)
@click.option(
    "--connections",
    type=click.IntRange(min=1),
    default=CONNECTIONS_MAX,
    metavar="N",
    help=f"Most connections to open; requests wait for a free one. Default: {CONNECTIONS_MAX}.",
)
@click.option(
    "--timeout-ms",
    type=Milliseconds(),
    default=30_000,
    metavar="N",
    help="Timeout of a request after its scheduled time, in ms. Default: 30000.",
)
@click.option(
    "--slo-ms",
    type=Milliseconds(),
    metavar="N",
    help="Latency objective in ms; later responses count as late. Default: the server's.",
)
@traces_option
@seed_option
@json_option
@report_option
def command(
    url: str,
    arrivals: tuple[str, ...],
    trace: str | None,
    concurrency: int | None,
    duration_ns: int | None,
    model: str | None,
    payload: str,
    is_binary: bool,
    headers: tuple[tuple[str, str], ...],
    connections: int,
    timeout_ms: float,
    slo_ms: float | None,
    traces: Path | None,
    seed: int,
    as_json: bool,
    report: Path | None,
) -> int:
    """Send requests to the server at URL and print outcomes and latencies.

    Open loop: requests are sent on schedule, whether or not earlier ones were answered, and latency
    counts from the scheduled time of a request. Exit status: 1 if requests were sent and none had
    a result, in time or late.

    \b
    headgate load http://127.0.0.1:8080 --model resnet --arrivals poisson:rate=200/s
    headgate load http://127.0.0.1:8080 --trace requests.csv --slo-ms 100 --report out
    """
    options = LoadOptions(
        model=model,
        body=None if payload == _AUTO else read_body(Path(payload)),
        is_binary=is_binary,
        headers=dict(headers),
        connections_max=connections,
        timeout_ns=_ns(timeout_ms),
        slo_ns=None if slo_ms is None else _ns(slo_ms),
        seed=seed,
    )
    given = {"--arrivals": bool(arrivals), "--trace": bool(trace), "--concurrency": concurrency}
    _check_one_of(given)
    make_directory(report, "--report")
    if concurrency is not None:
        result = _closed(url, concurrency, duration_ns or _DURATION_NS, options)
    else:
        processes = arrivals if trace is None else (f"{TRACE}{trace}",)
        workload = WorkloadOptions(duration_ns=duration_ns, traces=traces)
        result = _open(url, _arrivals(processes, workload, seed), options)
    summary = summarise_load(result)
    if report is not None:
        _write(report, url, result, summary)
    if as_json:
        show_json({"url": url, **summary.to_json()})
    else:
        _show(url, summary, result, report)
    run = summary.run
    return 1 if run.requests and not run.met + run.late else 0


def _open(url: str, arrivals: Arrivals, options: LoadOptions) -> LoadResult:
    with Progress(f"sending to {url}", len(arrivals)) as progress:
        return run_open_loop(
            url,
            arrivals,
            options,
            on_progress=lambda now: progress.describe(progress_line(now), now.ended, len(arrivals)),
        )


def _closed(url: str, concurrency: int, duration_ns: int, options: LoadOptions) -> LoadResult:
    with Progress(f"sending to {url}", duration_ns) as progress:
        return run_closed_loop(
            url,
            concurrency,
            duration_ns,
            options,
            on_progress=lambda now: progress.describe(
                progress_line(now), now.elapsed_ns, duration_ns
            ),
        )


def _check_one_of(given: Mapping[str, object]) -> None:
    names = [name for name, value in given.items() if value]
    allowed = f"one of {', '.join(given)}"
    if not names:
        raise ConfigError("there are no requests to send", allowed=allowed)
    if len(names) > 1:
        raise ConfigError(
            f"cannot be given together with {names[1]}", where=names[0], allowed=allowed
        )


def _arrivals(processes: tuple[str, ...], options: WorkloadOptions, seed: int) -> Arrivals:
    """Return the requests to send, in order of time."""
    parts: list[Arrivals] = []
    for index, process in enumerate(processes):
        where = "--trace" if process.startswith(TRACE) else "--arrivals"
        part = read_process(process, options, _DURATION_NS, seed, index, where=where)
        if isinstance(part, ClosedLoop):
            problem = "is a closed loop, not an arrival process"
            raise ConfigError(problem, where=where, value=process, allowed="--concurrency N")
        parts.append(part)
    return mix(parts) if len(parts) > 1 else parts[0]


def _write(report: Path, url: str, result: LoadResult, summary: LoadSummary) -> None:
    load = summary.to_json()["load"]
    with writing(report, "--report"):
        meta = {"url": url, "load": load}
        write_report(report, result.to_run(), summary.run, meta, title=f"Load on {url}")


def _show(url: str, summary: LoadSummary, result: LoadResult, report: Path | None) -> None:
    kind = "closed loop" if result.is_closed_loop else "open loop"
    show(Text(f"{url}, {kind}\n", "bold"), *load_lines(summary, result))
    if report is not None:
        show(Text(f"report: {report / 'report.html'}"))


def _ns(value_ms: float) -> int:
    return max(1, round(value_ms * MILLISECOND_NS))


def progress_line(now: LoadProgress) -> str:
    """Return the text of the progress bar.

    >>> progress_line(LoadProgress(10**9, 200, 190, 195.0, (188, 2, 0, 0, 0, 0), 1.5, 3.25))
    '195/s  met 188  late 2  p50 1.5 ms  p99 3.25 ms'
    """
    counts = [
        f"{name} {count:,}"
        for name, count in zip(OUTCOME_NAMES, now.outcomes, strict=True)
        if count
    ]
    times = [f"{name} {ms(value)}" for name, value in (("p50", now.p50_ms), ("p99", now.p99_ms))]
    return "  ".join((f"{now.rate_per_s:,.0f}/s", *counts, *times))


def load_lines(summary: LoadSummary, result: LoadResult) -> Iterator[RenderableType]:
    """Yield the outcomes, the latencies, and then anything unusual."""
    yield _outcomes(summary)
    yield _latencies(summary)
    answers = ", ".join(f"{name}: {count:,}" for name, count in summary.answers.items())
    yield Text(f"responses     {answers or 'none'}")
    run = summary.run
    rates = f"{per_second(run.goodput_rps)} in time, {per_second(run.throughput_rps)} in all"
    yield Text(f"throughput    {rates}, of {per_second(summary.offered_rps)} sent")
    if run.rejected:
        yield Text(
            f"rejected      after {ms(summary.rejected_p50_ms)} (p50),"
            f" {ms(summary.rejected_p99_ms)} (p99)"
        )
    if summary.timings_p50_ms:
        parts = (f"{name} {ms(value)}" for name, value in summary.timings_p50_ms.items())
        yield Text(f"in the server {', '.join(parts)} (p50)")
    waited = f", {summary.waited_for_connection:,} requests waited for one"
    waited += f" (p99 of all {ms(summary.connection_wait_p99_ms)})"
    yield Text(
        f"connections   {summary.connections:,}{waited if summary.waited_for_connection else ''}"
    )
    if result.is_closed_loop:
        yield Text("A closed loop hides queueing: real users would see higher latencies.", "yellow")
        return
    lag = f"{ms(summary.lag_p50_ms)} (p50), {ms(summary.lag_p99_ms)} (p99)"
    yield Text(f"send lag      {lag}, {ms(summary.lag_max_ms)} at most")
    if summary.is_doubtful:
        yield Text(
            "Unreliable: the load generator fell behind its schedule, and its lag is part of these"
            " latencies. Send less, or from a machine with an idle core.",
            "bold yellow",
        )


def _outcomes(summary: LoadSummary) -> ReportTable:
    run = summary.run
    counts = [(name, getattr(run, name)) for name in OUTCOME_NAMES]
    rows = [(name, count) for name, count in counts if count or name == "met"]
    total = max(run.requests, 1)
    return ReportTable(
        "",
        (
            format_column("outcome", "text", [name for name, _ in rows]),
            format_column("requests", "count", [count for _, count in rows]),
            format_column("share", "share", [count / total for _, count in rows]),
        ),
    )


def _latencies(summary: LoadSummary) -> ReportTable:
    label = format_column("", "text", ["latency"])
    return ReportTable("", (label, *field_columns(_LATENCIES, [summary.run])))
