"""The load generator, the same for all peers: wrk if installed, else Headgate's closed loop.

Also the request bodies of each peer, and the check of responses.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Final

import numpy as np

from headgate.core.clock import MILLISECOND_NS, SECOND_NS
from headgate.lab.bench.live.models import Floats
from headgate.loadgen.loops import run_closed_loop
from headgate.loadgen.requests import JSON_HEADERS, Body, LoadOptions
from headgate.metrics.summary import nearest_rank

_WARM_UP_S: Final = 0.5
_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class LoadMeasurement:
    """One measurement. `errors` counts responses other than 200, and missing responses."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    errors: int


def driver_name() -> str:
    return "headgate load" if shutil.which("wrk") is None else "wrk"


def drive(url: str, body: Body, concurrency: int, seconds: float) -> LoadMeasurement:
    """Run a closed loop at a concurrency for some seconds, after a warm-up."""
    if shutil.which("wrk") is None:
        return _measure_closed_loop(url, body, concurrency, seconds)
    _wrk(url, body, concurrency, _WARM_UP_S)
    return _wrk(url, body, concurrency, seconds)


def _measure_closed_loop(url: str, body: Body, concurrency: int, seconds: float) -> LoadMeasurement:
    result = run_closed_loop(
        url,
        concurrency,
        round(seconds * SECOND_NS),
        LoadOptions(body=body),
        warm_up_ns=round(_WARM_UP_S * SECOND_NS),
    )
    is_ok = result.status == 200
    if not is_ok.any():
        return LoadMeasurement(0.0, nan, nan, len(result))
    p50_ns, p99_ns = nearest_rank(result.latency_ns[is_ok], (500, 990))
    return LoadMeasurement(
        int(is_ok.sum()) / seconds,
        p50_ns / MILLISECOND_NS,
        p99_ns / MILLISECOND_NS,
        int((~is_ok).sum()),
    )


def _wrk(url: str, body: Body, concurrency: int, seconds: float) -> LoadMeasurement:
    """Run wrk, whose duration is in whole seconds, at least one."""
    with TemporaryDirectory() as directory:
        content, script = Path(directory, "body"), Path(directory, "post.lua")
        content.write_bytes(body.content)
        script.write_text(_script(content, body), encoding="utf-8")
        duration = f"{max(1, round(seconds))}s"
        flags = ["-t1", f"-c{concurrency}", f"-d{duration}", "--timeout", "30s", "-s", str(script)]
        done = subprocess.run(["wrk", *flags, url], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    errors = int(result["errors"])
    rate = (result["requests"] - result["bad"]) / result["took_us"] * 1e6
    return LoadMeasurement(rate, result["p50_us"] / 1e3, result["p99_us"] / 1e3, errors)


def _script(content: Path, body: Body) -> str:
    """Return the Lua script of wrk: the request, and the results as a line of JSON."""
    headers = "".join(f'wrk.headers["{k}"] = "{v}"\n' for k, v in body.headers.items())
    return (
        f'local file = io.open("{content}", "rb")\n'
        'wrk.method, wrk.body = "POST", file:read("*a")\n'
        "file:close()\n"
        f"{headers}"
        "function done(summary, latency, requests)\n"
        "  local e = summary.errors\n"
        "  local lost = e.connect + e.read + e.write + e.timeout\n"
        '  local text = \'{"requests":%d,"took_us":%d,"bad":%d,"errors":%d,\'\n'
        '  text = text .. \'"p50_us":%d,"p99_us":%d}\\n\'\n'
        "  local p50, p99 = latency:percentile(50), latency:percentile(99)\n"
        "  io.write(string.format(text, summary.requests, summary.duration, e.status,\n"
        "    lost + e.status, p50, p99))\n"
        "end\n"
    )


def make_request(kind: str, x: Floats) -> Body:
    """Return the request body for `x`, a tensor of one item."""
    return _ENCODERS[kind](x)


def is_correct(content: bytes, expected: list[float]) -> bool:
    """Whether a response contains these numbers: as its last bytes, or as a list in its JSON."""
    size = 4 * len(expected)
    if len(content) >= size:
        raw = np.frombuffer(content[-size:], "<f4")
        if np.isfinite(raw).all() and np.allclose(raw, expected, atol=_TOLERANCE):
            return True
    try:
        value = json.loads(content)
    except ValueError:
        return False
    return any(
        len(numbers) == len(expected) and np.allclose(numbers, expected, atol=_TOLERANCE)
        for numbers in _lists(value)
    )


def _lists(value: object) -> Iterator[list[float]]:
    """Yield every list of numbers in a JSON value."""
    if isinstance(value, Mapping):
        for member in value.values():
            yield from _lists(member)
    elif isinstance(value, list):
        if value and all(isinstance(item, int | float) for item in value):
            yield value
        for item in value:
            yield from _lists(item)


def _tensor(x: Floats, **content: object) -> dict[str, object]:
    return {"name": "x", "datatype": "FP32", "shape": list(x.shape), **content}


def _oip_binary(x: Floats) -> Body:
    tensor = _tensor(x, parameters={"binary_data_size": x.nbytes})
    header = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    head = json.dumps(header).encode()
    return Body(head + x.tobytes(), {**_BINARY, "Inference-Header-Content-Length": str(len(head))})


def _oip_base64(x: Floats) -> Body:
    return _json(inputs=[_tensor(x, datatype="BYTES", shape=[1, 1], data=[_base64(x)])])


def _json(**members: object) -> Body:
    return Body(json.dumps(members).encode(), JSON_HEADERS)


def _base64(x: Floats) -> str:
    return b64encode(x.tobytes()).decode()


_BINARY: Final = MappingProxyType({"Content-Type": "application/octet-stream"})
_ENCODERS: Final[Mapping[str, Callable[[Floats], Body]]] = MappingProxyType(
    {
        "values": lambda x: _json(values=x.ravel().tolist()),
        "raw": lambda x: Body(x.tobytes(), _BINARY),
        "base64": lambda x: _json(b64=_base64(x)),
        "base64_list": lambda x: _json(b64=[_base64(x)]),
        "instances": lambda x: _json(instances=[{"b64": _base64(x)}]),
        "oip": lambda x: _json(inputs=[_tensor(x, data=x.ravel().tolist())]),
        "oip_base64": _oip_base64,
        "oip_binary": _oip_binary,
    }
)
