"""Ray Serve: one replica; batches of up to 8 within 5 ms for the models, none for the echo.

With RAY_SERVE_ENABLE_DIRECT_INGRESS=1 the replica itself listens, otherwise the proxy does.

python server.py MODEL PORT MODELS
"""

import os
import sys
import time

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

SHAPES = {"cnn": (3, 64, 64), "wide": (256,), "slow": (3, 64, 64)}
DEPLOYED = {"num_replicas": 1, "max_ongoing_requests": 256, "ray_actor_options": {"num_cpus": 0.5}}


@serve.deployment(**DEPLOYED)
class Echo:
    """Returns its input."""

    async def __call__(self, request: Request) -> dict:
        """Return the input."""
        return await request.json()


@serve.deployment(**DEPLOYED)
class Onnx:
    """A model with raw bytes as request and response."""

    def __init__(self, path: str, shape: tuple, batch: int) -> None:
        import onnxruntime  # noqa: PLC0415  # not needed by the echo

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(path, options, providers=providers)
        self.shape = shape
        self.infer.set_max_batch_size(batch)

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.005)
    async def infer(self, items: list) -> list:
        """Run a batch."""
        x = np.frombuffer(b"".join(items), np.float32).reshape(len(items), *self.shape)
        return list(self.session.run(None, {"x": x})[0])

    async def __call__(self, request: Request) -> Response:
        """Run one request: tensors as raw bytes in both directions."""
        y = await self.infer(await request.body())
        return Response(y.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    model, port, models = sys.argv[1:]
    is_direct = os.environ.get("RAY_SERVE_ENABLE_DIRECT_INGRESS") == "1"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(port) + 2 * is_direct},
        logging_config={"enable_access_log": False, "log_level": "ERROR"},
    )
    if model == "echo":
        served = Echo.bind()
    else:
        # `slow` is for overload with an SLO of 150 ms: no batching, which would not help, and a
        # concurrency limit that can meet the SLO. Other requests are rejected: Ray Serve has no
        # other means to enforce deadlines.
        if model == "slow":
            Onnx = Onnx.options(max_ongoing_requests=6, max_queued_requests=1)
        served = Onnx.bind(f"{models}/{model}.onnx", SHAPES[model], 1 if model == "slow" else 8)
    serve.run(served, route_prefix="/")
    while True:
        time.sleep(3600)
