"""Reports about a run: JSON, Parquet, plots, one HTML page, and a trace for Perfetto."""

from headgate.metrics.report.write import write_report

__all__ = ["write_report"]
