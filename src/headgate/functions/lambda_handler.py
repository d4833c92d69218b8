"""The handler for AWS Lambda and compatible platforms: `headgate.functions.lambda_handler.handle`.

Environment variables configure it, as usual there:

- `HEADGATE_APP`: the application file, relative to the root of the package (`LAMBDA_TASK_ROOT`);
- `HEADGATE_FUNCTION`: the function to load before the first call. Default: the only one; if there
  are several, each is loaded when it is first called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Final, final

from headgate.config import AppConfig, load
from headgate.core.errors import ConfigError
from headgate.core.model import Function
from headgate.functions.batch_runner import BatchRunner
from headgate.functions.lambda_payload import CallJson, encode_response, parse_call
from headgate.functions.loader import load_runner
from headgate.functions.tensor import TaskResult

HOLD_MS_MAX: Final = 1_000.0
GATEWAY_TIMEOUT: Final = 504


@final
class Handler:
    """One instance: loads functions once and handles one call at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._root = Path(environment.get("LAMBDA_TASK_ROOT", "."))
        self._app_file = environment.get("HEADGATE_APP", "")
        self._function_name = environment.get("HEADGATE_FUNCTION", "")
        self._config: AppConfig | None = None
        self._runners: dict[str, BatchRunner] = {}
        self._is_cold = True

    def warm_up(self) -> None:
        """Load the function now, so that the first call need not wait. Raises `ConfigError`."""
        functions = self._application().app.functions
        if self._function_name or len(functions) == 1:
            self._runner(self._function_name or functions[0].name)

    def handle(self, event: object, context: object) -> dict[str, object]:
        """Handle one call. The platform reports an exception as an error of the function."""
        began_s = monotonic()
        is_cold, self._is_cold = self._is_cold, False
        call = parse_call(event)
        results: list[TaskResult] = []
        if call.ping:
            sleep(max(0.0, min(call.hold_ms, HOLD_MS_MAX)) / 1e3)
        else:
            results = self._run(call, began_s)
        took_ms = (monotonic() - began_s) * 1e3
        return encode_response(results, is_cold=is_cold, took_ms=took_ms)

    def _run(self, call: CallJson, began_s: float) -> list[TaskResult]:
        runner = self._runner(call.function)
        passed_ms = (monotonic() - began_s) * 1e3  # loading may have taken a while
        deadline_ms = call.deadline_ms
        if deadline_ms is not None and call.is_hard and deadline_ms <= passed_ms:
            problem = "the deadline passed before the request was run"
            return [TaskResult(task.task_id, [], problem, GATEWAY_TIMEOUT) for task in call.tasks]
        return runner.run(call.tasks)

    def _application(self) -> AppConfig:
        if self._config is None:
            if not self._app_file:
                raise ConfigError("is not set", key="HEADGATE_APP", allowed="an application file")
            self._config = load(str(self._root / self._app_file))
        return self._config

    def _runner(self, name: str) -> BatchRunner:
        runner = self._runners.get(name)
        if runner is None:
            config = self._application()
            known = {function.name: function for function in config.app.functions}
            if name not in known:
                allowed = ", ".join(known)
                raise ConfigError("no such function", value=name, allowed=allowed)
            runner = self._runners[name] = self._load(config, known[name])
        return runner

    def _load(self, config: AppConfig, function: Function) -> BatchRunner:
        pools, variants = config.app.pools, function.variants
        remote = (v for v in variants if any(pools[id].faas is not None for id in v.pool_ids))
        variant = next(remote, variants[0])
        base = str((self._root / self._app_file).parent)
        return load_runner(config.app, config.sources, base, variant)


_HANDLER: Final = Handler(os.environ)
if "HEADGATE_APP" in os.environ:  # the platform imports this module before the first call
    _HANDLER.warm_up()
handle = _HANDLER.handle
