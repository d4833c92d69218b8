"""The load: wrk where it is installed, else our own closed loop; the same for everybody."""

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
from headgate.loadgen import Body, LoadOptions, run_closed_loop
from headgate.loadgen.requests import JSON_HEADERS
from headgate.metrics.summary import nearest_rank

_WARM_UP_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class LoadMeasurement:
    """One measurement. `errors` are answers other than 200, and answers that never came."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    errors: int


def driver_name() -> str:
    """Who sends the requests."""
    return "headgate load" if shutil.which("wrk") is None else "wrk"


def drive(url: str, body: Body, concurrency: int, seconds: float) -> LoadMeasurement:
    """Keep so many requests under way for so long."""
    if shutil.which("wrk") is None:
        return _own(url, body, concurrency, seconds)
    _wrk(url, body, concurrency, _WARM_UP_S)
    return _wrk(url, body, concurrency, seconds)


def _own(url: str, body: Body, concurrency: int, seconds: float) -> LoadMeasurement:
    result = run_closed_loop(
        url,
        concurrency,
        round(seconds * SECOND_NS),
        LoadOptions(body=body),
        warm_up_ns=round(_WARM_UP_S * SECOND_NS),
    )
    is_right = result.status == 200
    if not is_right.any():
        return LoadMeasurement(0.0, nan, nan, len(result))
    p50_ns, p99_ns = nearest_rank(result.latency_ns[is_right], (500, 990))
    return LoadMeasurement(
        int(is_right.sum()) / seconds,
        p50_ns / MILLISECOND_NS,
        p99_ns / MILLISECOND_NS,
        int((~is_right).sum()),
    )


def _wrk(url: str, body: Body, concurrency: int, seconds: float) -> LoadMeasurement:
    """Run wrk. It counts whole seconds, so a fraction is rounded up."""
    with TemporaryDirectory() as directory:
        content, script = Path(directory, "body"), Path(directory, "post.lua")
        content.write_bytes(body.content)
        script.write_text(_script(content, body), encoding="utf-8")
        duration = f"{max(1, round(seconds))}s"
        flags = ["-t1", f"-c{concurrency}", f"-d{duration}", "--timeout", "30s", "-s", str(script)]
        done = subprocess.run(["wrk", *flags, url], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    errors = int(found["errors"])
    rate = (found["requests"] - found["bad"]) / found["took_us"] * 1e6
    return LoadMeasurement(rate, found["p50_us"] / 1e3, found["p99_us"] / 1e3, errors)


def _script(content: Path, body: Body) -> str:
    """What wrk sends, and the line of JSON that it prints in the end."""
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


# How each contestant is sent the same tensor, and whether its answer is the right one.


_TOLERANCE: Final = 1e-3


def make_request(kind: str, x: Floats) -> Body:
    """Return the request that carries `x`, which holds one item."""
    return _KINDS[kind](x)


def is_right(content: bytes, expected: list[float]) -> bool:
    """Tell whether the answer holds these numbers: as its last bytes, or as a list in its JSON."""
    size = 4 * len(expected)
    if len(content) >= size:
        raw = np.frombuffer(content[-size:], "<f4")
        if np.isfinite(raw).all() and np.allclose(raw, expected, atol=_TOLERANCE):
            return True
    try:
        document = json.loads(content)
    except ValueError:
        return False
    return any(
        len(found) == len(expected) and np.allclose(found, expected, atol=_TOLERANCE)
        for found in _lists(document)
    )


def _lists(document: object) -> Iterator[list[float]]:
    """Every list of numbers in it, flattened."""
    if isinstance(document, Mapping):
        for value in document.values():
            yield from _lists(value)
    elif isinstance(document, list):
        if document and all(isinstance(item, int | float) for item in document):
            yield document
        for item in document:
            yield from _lists(item)


def _values(x: Floats) -> Body:
    return _json({"values": x.ravel().tolist()})


def _raw(x: Floats) -> Body:
    return Body(x.tobytes(), {"Content-Type": "application/octet-stream"})


def _base64(x: Floats) -> Body:
    return _json({"b64": _text(x)})


def _base64_list(x: Floats) -> Body:
    return _json({"b64": [_text(x)]})


def _instances(x: Floats) -> Body:
    return _json({"instances": [{"b64": _text(x)}]})


def _oip(x: Floats) -> Body:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
    return _json({"inputs": [tensor]})


def _oip_base64(x: Floats) -> Body:
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": [_text(x)]}
    return _json({"inputs": [tensor]})


def _oip_binary(x: Floats) -> Body:
    size = {"binary_data_size": x.nbytes}
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "parameters": size}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    head = json.dumps(document).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return Body(head + x.tobytes(), headers)


def _json(document: object) -> Body:
    return Body(json.dumps(document).encode(), JSON_HEADERS)


def _text(x: Floats) -> str:
    return b64encode(x.tobytes()).decode()


_KINDS: Final[Mapping[str, Callable[[Floats], Body]]] = MappingProxyType(
    {
        "values": _values,
        "raw": _raw,
        "base64": _base64,
        "base64_list": _base64_list,
        "instances": _instances,
        "oip": _oip,
        "oip_base64": _oip_base64,
        "oip_binary": _oip_binary,
    }
)
