"""A hand-written server: FastAPI on uvicorn, the model in the same process, no batching.

python server.py MODEL PORT MODELS
"""

import sys

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

app = FastAPI()


class Values(BaseModel):
    """A small tensor as JSON."""

    values: list[float]


@app.post("/echo")
async def echo(body: Values) -> Values:
    """Returns its input."""
    return body


def serve_onnx(path: str, shape: tuple[int, ...]) -> None:
    """Serve a model: tensors as raw bytes in both directions."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    @app.post("/infer")
    async def infer(request: Request) -> Response:
        x = np.frombuffer(await request.body(), np.float32).reshape(shape)
        (y,) = session.run(None, {"x": x})
        return Response(y.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    model, port, models = sys.argv[1:]
    if model in ("cnn", "slow"):
        serve_onnx(f"{models}/{model}.onnx", (1, 3, 64, 64))
    elif model == "wide":
        serve_onnx(f"{models}/wide.onnx", (1, 256))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="error", access_log=False)
