"""A runtime that completes calls on the next turn of the loop, with the outcome a test wants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from headgate.core.model import App, Function, Pipeline, Pool, Profile, Slo, Stage, Variant
from headgate.core.states import LATE, MET, Failure, Outcome, Rejection, Settlement
from headgate.functions.tensor import Tensor, TensorSpec
from headgate.live.call import Call, GatewayPhase, ServedModel


class FakeRuntime:
    """Serves models that echo their inputs; `mode` selects another outcome.

    Modes: echo, late, overloaded, infeasible, refuse (the function's 400), fail (its 500), lost,
    expire, never, raise (a defect), bytes (an output that is not UTF-8), large (one of 100 kB).
    """

    def __init__(self) -> None:
        function = Function(0, "f", (Variant(0, "f", 0, (0,), Profile((1_000_000,))),))
        self.app = App((function,), (), (Pool(0, "pool"),))
        self.models: dict[str, ServedModel] = {}
        self.phase = GatewayPhase.READY
        self.mode = "echo"
        self.calls: list[Call] = []
        self.cancelled: list[Call] = []
        self.problems: dict[str, str] = {}  # why models are not ready, by name
        self._stages = (Stage(function),)
        any_fp32 = (TensorSpec("x", "FP32", (-1, 2)),)
        self.add("echo", any_fp32, any_fp32)
        self.add(
            "bytes", (TensorSpec("x", "BYTES", (-1, 1)),), (TensorSpec("x", "BYTES", (-1, 1)),)
        )
        self.add("free", (), ())
        self.add("whole", (), (), batches=False)
        two = (TensorSpec("a", "INT64", (-1,)), TensorSpec("b", "FP32", (-1, 3)))
        self.add("two", two, two)

    def add(
        self,
        name: str,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        *,
        batches: bool = True,
    ) -> None:
        pipeline = Pipeline(len(self.models), name, self._stages, Slo(100_000_000))
        self.models[name] = ServedModel(name, pipeline, "python", inputs, outputs, batches, 8)

    def problem(self, model: ServedModel) -> str:
        return self.problems.get(model.name, "")

    def breakers(self) -> Mapping[str, str]:
        return {}

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def submit(self, call: Call) -> None:
        if self.mode == "raise":
            raise RuntimeError("planted")
        self.calls.append(call)
        if self.mode != "never":
            asyncio.get_running_loop().call_soon(self.complete, call)

    def cancel(self, call: Call) -> None:
        self.cancelled.append(call)

    def complete(self, call: Call) -> None:
        if call in self.cancelled:
            return
        call.settlement, call.error, call.status = _RESULTS.get(self.mode, (MET, "", 500))
        if call.settlement.outcome in (Outcome.MET, Outcome.LATE):
            call.began_ns = call.arrived_ns + 1000
            call.ended_ns = call.began_ns + 2000
            call.outputs = call.inputs
            if self.mode == "bytes":
                data = memoryview(b"\x01\x00\x00\x00\xff")
                call.outputs = [Tensor("x", "BYTES", (1, 1), data)]
            elif self.mode == "large":
                call.outputs = [Tensor("x", "UINT8", (1, 100_000), memoryview(bytes(100_000)))]
        call.on_answer(call)


# By mode: how the call is settled, and the error of the function with its status.
_RESULTS: Mapping[str, tuple[Settlement, str, int]] = {
    "late": (LATE, "", 500),
    "overloaded": (
        Settlement(
            Outcome.REJECTED,
            Rejection.OVERLOADED,
            predicted_ns=300_000_000,
            retry_ns=1_200_000_000,
        ),
        "",
        500,
    ),
    "explained": (
        Settlement(
            Outcome.REJECTED,
            Rejection.OVERLOADED,
            predicted_ns=240_000_000,
            retry_ns=1_200_000_000,
            stage="classify",
            predicted_usd=2.5e-6,
            margin_ns=15_000_000,
            accepted_ns=255_000_000,
            accepted_usd=4e-6,
            short_of="cpu",
            short_ns=180_000_000,
            objective_ns=200_000_000,
            objective_usd=3e-6,
        ),
        "",
        500,
    ),
    "over_cost": (
        Settlement(
            Outcome.REJECTED, Rejection.OVER_COST, predicted_usd=5e-6, accepted_usd=5e-6, retry_ns=5
        ),
        "",
        500,
    ),
    "infeasible": (Settlement(Outcome.REJECTED, Rejection.INFEASIBLE, retry_ns=5), "", 500),
    "too_large": (Settlement(Outcome.REJECTED, Rejection.TOO_LARGE), "", 500),
    "too_large_at_last": (Settlement(Outcome.FAILED, Failure.TOO_LARGE), "", 500),
    "refuse": (Settlement(Outcome.FAILED), "x must be positive", 400),
    "fail": (Settlement(Outcome.FAILED), "division by zero", 500),
    "lost": (Settlement(Outcome.FAILED, "f: lost"), "", 500),
    "expire": (Settlement(Outcome.EXPIRED), "", 500),
}
