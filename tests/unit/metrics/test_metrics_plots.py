"""Figures: what can be checked without looking at them."""

from __future__ import annotations

import sys

import matplotlib as mpl
import numpy as np
import pytest
from metrics_runs import Row, Span, busy_run, make_run, node

from headgate.core.errors import ConfigError
from headgate.core.states import Outcome
from headgate.metrics.columns import SpanKind
from headgate.metrics.confidence import Interval, mean_interval
from headgate.metrics.report.comparison_plots import comparison_figure, sweep_figure
from headgate.metrics.report.plots import latency_figure, run_plots, schedule_figure, waits_figure
from headgate.metrics.report.style import new_figure, time_scale, to_svg
from headgate.metrics.summary import summarise


def _legend(figure: object) -> list[str]:
    (axes,) = figure.axes  # type: ignore[attr-defined]
    return [text.get_text() for text in axes.get_legend().get_texts()]


def _settings() -> dict[str, object]:
    # Asking for the backend makes matplotlib choose one, and import pyplot.
    return {key: mpl.rcParams[key] for key in mpl.rcParams if key != "backend"}


def test_plotting_changes_no_settings_and_imports_no_pyplot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would fail
    before = _settings()
    for plot in run_plots(busy_run()):
        to_svg(plot.figure, plot.name)
    assert _settings() == before


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install headgate\[report\]"):
        new_figure()


def test_a_run_that_answered_nothing_has_no_latency_plot() -> None:
    run = make_run([Row(0, None, 0, Outcome.REJECTED)])
    assert [plot.name for plot in run_plots(run)] == ["outcomes", "goodput"]


def test_one_request_of_zero_latency_can_be_drawn() -> None:
    """Latency and wait 0 on logarithmic axes must not raise."""
    run = make_run([Row(0, 0, 0, deadline=None)], [Span(0, 0, 1)], [node()], end_ms=1)
    for plot in run_plots(run):
        assert to_svg(plot.figure, plot.name).startswith("<svg")


def test_the_slo_of_each_pipeline_is_marked() -> None:
    rows = [Row(0, 0, 20, deadline=50), Row(0, 0, 30, pipeline=1, deadline=80)]
    (axes,) = latency_figure(make_run(rows)).axes
    dashed = [line for line in axes.lines if line.is_dashed()]
    assert sorted(float(np.ravel(line.get_xdata())[0]) for line in dashed) == [50.0, 80.0]


def test_a_shared_slo_is_marked_once() -> None:
    rows = [Row(0, 0, 20), Row(0, 0, 30, pipeline=1)]
    (axes,) = latency_figure(make_run(rows)).axes
    assert sum(line.is_dashed() for line in axes.lines) == 1


def test_special_characters_in_names_are_drawn_verbatim() -> None:
    """In matplotlib a leading underscore hides a legend entry, and a dollar begins a formula."""
    pipelines = ("_private", "costs $1 or $2")
    figure = latency_figure(make_run([Row(0, 0, 9), Row(0, 0, 9, pipeline=1)], pipelines=pipelines))
    to_svg(figure, "x")
    assert [label.strip() for label in _legend(figure)] == ["_private", r"costs \$1 or \$2"]


def test_waits_show_the_busiest_clients_and_count_the_others() -> None:
    names = tuple(f"client-{index}" for index in range(40))
    rows = [Row(0, 5, 9, client=c) for c in range(40) for _ in range(c + 1)]
    (axes,) = waits_figure(make_run(rows, clients=names)).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[:2] == ["client-39", "client-38"]
    assert axes.get_title(loc="left") == "Waits per client (the 24 busiest; 16 more)"


def test_the_schedule_has_a_row_per_track_and_a_colour_per_function() -> None:
    figure = schedule_figure(busy_run())
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["gpu-0 <b>", r"cpu-0 \$x\$", "#2"]
    assert _legend(figure) == ["resnet", "yolo"]


def test_the_schedule_names_functions_that_have_only_started() -> None:
    spans = [Span(0, 0, 40, SpanKind.START, 1), Span(0, 50, 65)]
    run = make_run([Row(0, 50, 65)], spans, [node("gpu-0", busy=55)])
    assert _legend(schedule_figure(run)) == ["resnet", "yolo"]


def test_the_schedule_ends_where_spans_are_left_out() -> None:
    """Beyond that a node that is busy would look idle."""
    long, short = Span(0, 0, 5000), [Span(1, start, start + 10) for start in range(0, 4000, 10)]
    run = make_run([Row(0, 0, 10)], [long, *short], [node("gpu-0"), node("gpu-1")])
    (axes,) = schedule_figure(run).axes
    assert axes.get_title(loc="left") == "Schedule: the first 250 of 401 spans"
    assert axes.get_xlim() == pytest.approx((0, 2.49))


def test_a_schedule_of_spans_that_all_start_at_once_shows_some() -> None:
    run = make_run([Row(0, 0, 10)], [Span(0, 0, 5000)] * 300, [node("gpu-0")])
    (axes,) = schedule_figure(run).axes
    assert axes.get_xlim() == pytest.approx((0, 5))


def test_a_comparison_has_three_panels_and_shows_every_value() -> None:
    rows = [("a", summarise(busy_run())), ("nothing", summarise(make_run([])))]
    figure = comparison_figure(rows)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["SLO attainment (%)", "Mean wait (ms)", r"Cost (\$)"]
    assert [text.get_text() for text in figure.axes[1].texts][1] == "-"
    to_svg(figure, "comparison")


def test_a_sweep_has_a_line_and_a_band_per_series() -> None:
    series: dict[str, list[Interval]] = {
        "headgate": [mean_interval([1.0, 2.0]), mean_interval([2.0, 3.0])],
        "one seed": [mean_interval([4.0]), mean_interval([5.0])],
    }
    figure = sweep_figure([10, 20], series, title="t", x_label="x", y_label="y")
    (axes,) = figure.axes
    assert (len(axes.lines), len(axes.collections)) == (2, 2)
    assert _legend(figure) == ["headgate", "one seed"]
    to_svg(figure, "sweep")


@pytest.mark.parametrize(
    ("end_s", "unit"), [(0.5, "ms"), (1, "s"), (599, "s"), (600, "min"), (86_400, "h")]
)
def test_time_axes_have_short_numbers(end_s: float, unit: str) -> None:
    assert time_scale(int(end_s * 1e9)).unit == unit
