"""Ray Serve: the ensemble and the cascade of examples/images, a deployment per model.

An ingress composes them by handles. What one model returns goes from its replica to the next
without being fetched by the ingress, as far as nothing depends on it; the models of the ensemble
run side by side. With `inline` the ingress runs the cheap models itself: fewer hops, but a process
that does nothing else meanwhile. No batching: batches gain nothing with these models.

python pipelines.py PIPELINE PORT MODELS STAGES        STAGES: deployed, inline
"""

import os
import sys
import time

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

SHAPE = (1, 256, 256, 3)
DEPLOYED = {"num_replicas": 1, "max_ongoing_requests": 256, "ray_actor_options": {"num_cpus": 0.2}}


class Session:
    """An ONNX model on one thread. Outputs in the given order; one alone is not in a list."""

    def __init__(self, path: str, inputs: tuple, outputs: tuple) -> None:
        import onnxruntime  # noqa: PLC0415  # not needed by the process that deploys

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(path, options, providers=providers)
        self.inputs, self.outputs = inputs, list(outputs)

    def run(self, *values: np.ndarray) -> object:
        """Run the model."""
        found = self.session.run(self.outputs, dict(zip(self.inputs, values, strict=True)))
        return found if len(found) > 1 else found[0]


@serve.deployment(**DEPLOYED)
class Onnx(Session):
    """A model in a replica of its own."""

    async def __call__(self, *values: np.ndarray) -> object:
        """Run the model on the event loop: a replica has one model, and nothing else to do."""
        return self.run(*values)


class Inline(Session):
    """A model in the ingress, called as if it were in a replica."""

    def __call__(self, *values: np.ndarray) -> object:
        """Run the model."""
        return self.run(*values)


def call(model: object, *values: object) -> object:
    """Call a model, wherever it is. What a replica returns is awaited by whoever needs it."""
    return model(*values) if isinstance(model, Inline) else model.remote(*values)


async def value(result: object) -> object:
    """Return a result, from wherever it is."""
    return result if isinstance(result, np.ndarray | list) else await result


def image(content: bytes) -> np.ndarray:
    """Return the picture, without a copy."""
    return np.frombuffer(content, np.uint8).reshape(SHAPE)


def respond(probabilities: np.ndarray) -> Response:
    """Return a response of raw bytes."""
    return Response(probabilities.tobytes(), media_type="application/octet-stream")


def placed(model: object) -> object:
    """Return a model that runs here, or the handle of its deployment."""
    return Inline(*model) if isinstance(model, tuple) else model


@serve.deployment(**DEPLOYED)
class Ensemble:
    """Three models look at the same picture, and their votes are joined."""

    def __init__(self, resize: object, vote: object, *voters: object) -> None:
        self.resize, self.vote, self.voters = placed(resize), placed(vote), voters

    async def __call__(self, request: Request) -> Response:
        """Fan out and join."""
        pixels = call(self.resize, image(await request.body()))
        votes = [call(voter, pixels) for voter in self.voters]
        if isinstance(self.vote, Inline):
            votes = [await each for each in votes]
        return respond(await value(call(self.vote, *votes)))


@serve.deployment(**DEPLOYED)
class Cascade:
    """A small model answers; a large one only if the small one is unsure."""

    def __init__(self, resize: object, small: object, large: object) -> None:
        self.resize, self.small, self.large = placed(resize), placed(small), large

    async def __call__(self, request: Request) -> Response:
        """Ask the large model only if the small one is unsure."""
        pixels = call(self.resize, image(await request.body()))
        probabilities, unsure = await value(call(self.small, pixels))
        if unsure[0]:
            probabilities = await call(self.large, pixels)
        return respond(probabilities)


def bind(pipeline: str, models: str, is_inline: bool) -> object:
    """Return the application."""

    def model(name: str, inputs: tuple, outputs: tuple, is_cheap: bool = False) -> object:
        arguments = (f"{models}/{name}.onnx", inputs, outputs)
        return arguments if is_cheap and is_inline else Onnx.options(name=name).bind(*arguments)

    resize = model("resize", ("image",), ("pixels",), is_cheap=True)
    if pipeline == "cascade":
        small = model("small", ("pixels",), ("probabilities", "unsure"), is_cheap=True)
        return Cascade.bind(resize, small, model("large", ("pixels",), ("probabilities",)))
    names = ("edges", "shapes", "texture")
    voters = [model(name, ("pixels",), (f"by_{name}",)) for name in names]
    votes = tuple(f"by_{name}" for name in names)
    vote = model("vote", votes, ("probabilities",), is_cheap=True)
    return Ensemble.bind(resize, vote, *voters)


if __name__ == "__main__":
    pipeline, port, models, stages = sys.argv[1:]
    is_direct = os.environ.get("RAY_SERVE_ENABLE_DIRECT_INGRESS") == "1"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(port) + 2 * is_direct},
        logging_config={"enable_access_log": False, "log_level": "ERROR"},
    )
    serve.run(bind(pipeline, models, stages == "inline"), route_prefix="/")
    while True:
        time.sleep(3600)
