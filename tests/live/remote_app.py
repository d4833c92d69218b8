"""An application with a local and a remote pool."""

from __future__ import annotations

from pathlib import Path

CODE = '''
import time
from pathlib import Path

import numpy as np

from headgate.functions import Model


class Doubles(Model):
    """One number in, one out, in 30 ms; 666 is too much."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def example(self):
        return {"x": np.array([-1], np.float32)}

    def predict(self, batch):
        if (batch["x"] == 666).any():
            raise ArithmeticError("of all numbers, this one")
        if batch["x"].max() >= 0:
            time.sleep(0.03)
        return {"y": batch["x"] * 2}
'''
APP = """
functions:
  double: {{code: "numbers_elsewhere:Doubles", exec_time: 30ms, cold_start: 100ms}}
slo: {{latency: 500ms}}
pools:
  local: {{tier: dedicated, nodes: 1, cpus: 1, price: $0.10/h}}
  cloud:
    tier: serverless
    provider: lambda
    target: doubler:live
    endpoint_url: {url}
    memory: 1769MB
    price: $0.0000166667/GB-s
    request_price: $0.20/1M
    circuit_breaker: {{failure_threshold: 3, cooldown: 300ms}}
policy: {policy}
limits: {{backoff: 20ms}}
serve: {{lame_duck: 100ms, drain: 5s, execution_timeout: {execution_timeout}}}
"""
THRESHOLD = "{name: threshold, threshold: 1}"


def write_app(
    directory: Path,
    url: str,
    *,
    policy: str = THRESHOLD,
    execution_timeout: str = "20s",
    more: str = "",
) -> Path:
    """Write the application into a directory; return the directory."""
    (directory / "numbers_elsewhere.py").write_text(CODE)
    (directory / "app.yaml").write_text(
        APP.format(url=url, policy=policy, execution_timeout=execution_timeout) + more
    )
    return directory


def reading(metrics: str, name: str, **labels: str) -> float:
    """Return the sum of a metric over all samples with these labels."""
    found = [
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
        and all(f'{label}="{value}"' in line for label, value in labels.items())
    ]
    assert found, f"there is no {name} with {labels}"
    return sum(found)
