"""What is sent and how: what both kinds of run share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from headgate.core.clock import SECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.rng import stream
from headgate.load.address import Address, Body, request_bytes
from headgate.load.payload import fetch_inputs, make_body
from headgate.workload.arrivals import DEFAULT_NAME

CONNECTIONS_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests look and how long they are waited for."""

    model: str | None = None  # every request goes to it; None: to the model its pipeline names
    body: Body | None = None  # None: made up from what the model says it takes
    is_binary: bool = False  # tensors as raw bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    connections_max: int = CONNECTIONS_MAX
    timeout_ns: int = 30 * SECOND_NS  # from the intended time
    slo_ns: int | None = None  # None: an answer is late if the server says so
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("connections_max", "timeout_ns"):
            if getattr(self, name) < 1:
                raise ConfigError("must be positive", key=name, value=getattr(self, name))


class Requests:
    """The bytes of each kind of request, made before the run."""

    def __init__(self, address: Address, options: LoadOptions) -> None:
        self._address = address
        self._options = options
        self._made: dict[tuple[str, int], bytes] = {}

    def of(self, pipeline: str, items: int) -> bytes:
        """Return the request for so many items of a pipeline. Asks the server, the first time."""
        model = self._options.model or (None if pipeline == DEFAULT_NAME else pipeline)
        key = model or "", items
        if key not in self._made:
            self._made[key] = self._make(model, items)
        return self._made[key]

    def _make(self, model: str | None, items: int) -> bytes:
        address, options = self._address, self._options
        body = options.body
        if model is None and (body is None or not address.path):
            problem = "does not say what to send"
            allowed = "--model NAME, or a URL with a path together with --payload FILE"
            raise ConfigError(problem, where="URL", value=address.authority, allowed=allowed)
        if body is None:
            assert model is not None
            rng = stream(options.seed, f"payload/{model}/{items}")
            inputs = fetch_inputs(address, model)
            body = make_body(inputs, items, rng, is_binary=options.is_binary)
        path = address.path if model is None else f"{address.model_path(model)}/infer"
        return request_bytes(address, "POST", path, body, options.headers)
