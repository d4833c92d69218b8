"""Requests of a load run: the address of the server, options, bodies, and the encoded bytes.

Bodies are generated from the metadata of a model (Open Inference Protocol), with tensors as JSON or
as raw bytes after the JSON (binary extension), or are read from a file.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from random import Random
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec
import numpy as np

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.rng import stream
from headgate.functions.tensor import ITEM_BYTES
from headgate.workload.arrivals import DEFAULT_NAME

CONNECTIONS_MAX: Final = 512
JSON_HEADERS: Final = {"Content-Type": "application/json"}
_DTYPES: Final = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES"),
)
_ELEMENTS_MAX: Final = 64 << 20  # per generated tensor
_RESPONSE_BYTES_MAX: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Address:
    """A server and the path of its URL, which has no slash at its end unless it is "/"."""

    host: str
    port: int
    is_secure: bool
    path: str

    @property
    def authority(self) -> str:
        """Host and port in the form of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def model_path(self, model: str) -> str:
        """Return the path of a model in the Open Inference Protocol."""
        return f"{self.path.rstrip('/')}/v2/models/{quote(model, safe='')}"


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request, and the headers that describe it."""

    content: bytes
    headers: Mapping[str, str]


def parse_address(url: str) -> Address:
    """Parse a URL; raise ConfigError if it is not the URL of an HTTP server.

    >>> parse_address("http://127.0.0.1:8080/v2/").path
    '/v2'
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"is not a URL: {error}", where="URL", value=url) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        allowed = "http://HOST:PORT or https://HOST:PORT"
        raise ConfigError("is not a URL of a server", where="URL", value=url, allowed=allowed)
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError("contains a character that a URL must not", where="URL", value=url)
    is_secure = parts.scheme == "https"
    path = parts.path if parts.path == "/" else parts.path.rstrip("/")
    path += f"?{parts.query}" if parts.query else ""
    return Address(parts.hostname, port or (443 if is_secure else 80), is_secure, path)


def request_bytes(
    address: Address, method: str, path: str, body: Body | None, headers: Mapping[str, str]
) -> bytes:
    """Return a whole HTTP request; raise ConfigError for an invalid header."""
    content = b"" if body is None else body.content
    lines = {"Host": address.authority}
    if body is not None:
        lines |= {**body.headers, "Content-Length": str(len(content))}
    lines |= headers
    _check_headers(lines)
    head = [f"{method} {path or '/'} HTTP/1.1", *(f"{k}: {v}" for k, v in lines.items())]
    return "\r\n".join((*head, "", "")).encode() + content


def _check_headers(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        line = f"{name}: {value}"
        if not name or not line.isascii() or not line.isprintable() or ":" in name or " " in name:
            raise ConfigError("is not a valid header", where="--header", value=line)


def fetch(
    address: Address,
    method: str,
    path: str,
    body: Body | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
) -> tuple[int, bytes]:
    """Send one request, before or after a run; return the status and the content.

    Raises OSError, also if the server does not speak HTTP.
    """
    if address.is_secure:
        context = ssl.create_default_context()
        connection: HTTPConnection = HTTPSConnection(
            address.host, address.port, timeout=timeout_s, context=context
        )
    else:
        connection = HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        content = None if body is None else body.content
        lines = {**({} if body is None else body.headers), **(headers or {})}
        connection.request(method, path or "/", content, lines)
        response = connection.getresponse()
        return response.status, response.read(_RESPONSE_BYTES_MAX)
    except HTTPException as error:
        raise OSError(f"does not speak HTTP: {type(error).__name__}") from None
    finally:
        connection.close()


class InputSpec(msgspec.Struct, frozen=True):
    """One input of a model, from its metadata."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class _Metadata(msgspec.Struct):
    inputs: tuple[InputSpec, ...] = ()


def fetch_inputs(address: Address, model: str, headers: Mapping[str, str]) -> tuple[InputSpec, ...]:
    """Fetch the inputs of a model from its metadata, for which a server may need a key, too."""
    _check_headers(headers)
    path = address.model_path(model)
    where = f"http{'s' if address.is_secure else ''}://{address.authority}{path}"
    try:
        status, content = fetch(address, "GET", path, headers=headers)
    except OSError as error:
        raise ConfigError(f"cannot be reached: {error}", where=where) from None
    if status != 200:
        text = content[:200].decode(errors="replace").strip()
        raise ConfigError(f"responds with status {status}: {text}", where=where)
    try:
        inputs = msgspec.json.decode(content, type=_Metadata).inputs
    except msgspec.DecodeError as error:
        raise ConfigError(f"is not the metadata of a model: {error}", where=where) from None
    if not inputs:
        problem = "the metadata of the model list no inputs"
        raise ConfigError(problem, where=where, allowed="--payload FILE")
    return inputs


def make_body(
    inputs: Sequence[InputSpec], items: int, rng: Random, *, is_binary: bool = False
) -> Body:
    """Return random tensors: floats in [0, 1), integers 0 or 1, strings of one digit.

    A dimension of -1 is `items` if it comes first, and 1 elsewhere.

    >>> make_body([InputSpec("x", "INT32", (-1, 2))], 1, Random(0)).content[:52]
    b'{"inputs":[{"name":"x","datatype":"INT32","shape":[1'
    """
    generator = np.random.default_rng(rng.getrandbits(64))
    described: list[dict[str, object]] = []
    raw: list[bytes] = []
    for spec in inputs:
        shape = _shape(spec, items)
        values = _values(spec, shape, generator)
        tensor: dict[str, object] = {"name": spec.name, "datatype": spec.datatype, "shape": shape}
        if is_binary:
            raw.append(_raw(values))
            tensor["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            tensor["data"] = _json_values(values)
        described.append(tensor)
    document: dict[str, object] = {"inputs": described}
    if not is_binary:
        return Body(msgspec.json.encode(document), JSON_HEADERS)
    document["parameters"] = {"binary_data_output": True}
    head = msgspec.json.encode(document)
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return Body(b"".join((head, *raw)), headers)


def read_body(path: Path) -> Body:
    """Return the content of a file as a body, with the content type of JSON if it is JSON."""
    try:
        content = path.read_bytes()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError(problem, where="--payload", value=str(path)) from None
    try:
        json.loads(content)
    except ValueError:
        return Body(content, {"Content-Type": "application/octet-stream"})
    return Body(content, JSON_HEADERS)


def _shape(spec: InputSpec, items: int) -> list[int]:
    shape = [1 if size == -1 else size for size in spec.shape]
    if spec.shape and spec.shape[0] == -1:
        shape[0] = items
    elif items > 1:
        problem = f"does not accept requests of {items} items"
        raise ConfigError(problem, key=f"input {spec.name}", value=list(spec.shape))
    if min(shape, default=1) < 0 or np.prod(shape, dtype=float) > _ELEMENTS_MAX:
        problem = "has an unusable shape"
        raise ConfigError(problem, key=f"input {spec.name}", value=list(spec.shape))
    return shape


def _values(
    spec: InputSpec, shape: list[int], generator: np.random.Generator
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    if spec.datatype not in _DTYPES:
        problem = "tensors of this type cannot be generated"
        allowed = f"{', '.join(_DTYPES)}, or --payload FILE"
        key = f"input {spec.name}"
        raise ConfigError(problem, key=key, value=spec.datatype, allowed=allowed)
    if spec.datatype.startswith("FP"):
        width = ITEM_BYTES[spec.datatype]
        return generator.random(shape).astype(f"<f{width}")
    # Integers are often indices into a table, and nearly every table has two entries.
    bits = generator.integers(0, 2, shape)
    if spec.datatype == "BYTES":
        return bits.astype("S1")
    if spec.datatype == "BOOL":
        return bits.astype(bool)
    kind = "u" if spec.datatype.startswith("U") else "i"
    return bits.astype(f"<{kind}{ITEM_BYTES[spec.datatype]}")


def _raw(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    if values.dtype.kind != "S":
        return values.tobytes()
    texts = [bytes(text) for text in values.ravel().tolist()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def _json_values(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> list[object]:
    flat: list[object] = values.ravel().tolist()
    if values.dtype.kind == "S":
        return [text.decode() if isinstance(text, bytes) else text for text in flat]
    return flat


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of both kinds of load run: what requests contain, timeouts and connections."""

    model: str | None = None  # the model of every request; None: the model of its pipeline's name
    body: Body | None = None  # None: generated from the metadata of the model
    is_binary: bool = False  # tensors as raw bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    connections_max: int = CONNECTIONS_MAX
    timeout_ns: int = 30 * SECOND_NS  # from the intended time
    slo_ns: int | None = None  # None: a response is late if the server says so
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("connections_max", "timeout_ns"):
            if getattr(self, name) < 1:
                raise ConfigError("must be positive", key=name, value=getattr(self, name))


class EncodedRequests:
    """The encoded requests of a run, one per model and number of items, made before the run."""

    def __init__(self, address: Address, options: LoadOptions) -> None:
        self._address = address
        self._options = options
        self._encoded: dict[tuple[str, int], bytes] = {}

    def of(self, pipeline: str, items: int) -> bytes:
        """Return the request of a pipeline with `items` items.

        The first call per model and number of items fetches the metadata of the model.
        """
        model = self._options.model or (None if pipeline == DEFAULT_NAME else pipeline)
        key = model or "", items
        if key not in self._encoded:
            self._encoded[key] = self._encode(model, items)
        return self._encoded[key]

    def _encode(self, model: str | None, items: int) -> bytes:
        address, options = self._address, self._options
        body = options.body
        if model is None and (body is None or not address.path):
            problem = "neither the URL nor the options say what to send"
            allowed = "--model NAME, or a URL with a path together with --payload FILE"
            raise ConfigError(problem, where="URL", value=address.authority, allowed=allowed)
        if body is None:
            assert model is not None
            rng = stream(options.seed, f"payload/{model}/{items}")
            inputs = fetch_inputs(address, model, options.headers)
            body = make_body(inputs, items, rng, is_binary=options.is_binary)
        path = address.path if model is None else f"{address.model_path(model)}/infer"
        return request_bytes(address, "POST", path, body, options.headers)
