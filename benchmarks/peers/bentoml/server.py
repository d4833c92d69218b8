"""BentoML: one worker; adaptive batches of up to 8 for the models, none for the echo.

MODEL=cnn MODELS=DIR bentoml serve server:service --port PORT
"""

import base64
import os

import bentoml
import numpy as np

MODEL, MODELS = os.environ["MODEL"], os.environ["MODELS"]
SHAPE = {"echo": (), "cnn": (3, 64, 64), "wide": (256,), "slow": (3, 64, 64)}[MODEL]

if MODEL == "echo":

    @bentoml.service(workers=1, logging={"access": {"enabled": False}})
    class service:
        """Returns its input."""

        @bentoml.api
        async def infer(self, values: list[float]) -> list[float]:
            """Return the input."""
            return values

else:
    # `slow` is for overload with an SLO of 150 ms: the smallest batches BentoML supports, and a
    # concurrency limit that can meet the SLO; other requests are rejected.
    IS_SLOW = MODEL == "slow"
    TRAFFIC = {"timeout": 60, "max_concurrency": 6} if IS_SLOW else {"timeout": 60}

    @bentoml.service(workers=1, traffic=TRAFFIC, logging={"access": {"enabled": False}})
    class service:
        """A model with base64 in JSON."""

        def __init__(self) -> None:
            import onnxruntime  # noqa: PLC0415  # not needed by the echo

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            path = f"{MODELS}/{MODEL}.onnx"
            providers = ["CPUExecutionProvider"]
            self.session = onnxruntime.InferenceSession(path, options, providers=providers)

        @bentoml.api(
            batchable=True,
            max_batch_size=2 if IS_SLOW else 8,
            max_latency_ms=150 if IS_SLOW else 10_000,
        )
        def infer(self, b64: list[str]) -> list[list[float]]:
            """Run a batch."""
            raw = b"".join(base64.b64decode(item) for item in b64)
            x = np.frombuffer(raw, np.float32).reshape(len(b64), *SHAPE)
            return self.session.run(None, {"x": x})[0].tolist()
