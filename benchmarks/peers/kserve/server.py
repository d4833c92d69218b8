"""KServe's model server: one process, its V2 protocol for the echo, V1 with base64 for the models.

KServe has no batching of its own, and its V2 protocol reads binary tensors even more slowly.

python server.py MODEL PORT MODELS
"""

import base64
import sys

import kserve
import numpy as np

SHAPES = {"cnn": (3, 64, 64), "wide": (256,), "slow": (3, 64, 64)}


class Echo(kserve.Model):
    """Returns its input."""

    def __init__(self):
        super().__init__("echo")
        self.ready = True

    async def predict(self, payload, headers=None, response_headers=None):
        """Return the input."""
        given = payload.inputs[0]
        output = kserve.InferOutput("y", given.shape, given.datatype, given.data)
        return kserve.InferResponse(payload.id or "0", "echo", [output])


class Onnx(kserve.Model):
    """An ONNX model."""

    def __init__(self, name, path):
        super().__init__(name)
        import onnxruntime  # noqa: PLC0415  # not needed by the echo

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(path, options, providers=providers)
        self.shape = SHAPES[name]
        self.ready = True

    async def predict(self, payload, headers=None, response_headers=None):
        """Run the instances of one request."""
        raw = b"".join(base64.b64decode(item["b64"]) for item in payload["instances"])
        x = np.frombuffer(raw, np.float32).reshape(-1, *self.shape)
        return {"predictions": self.session.run(None, {"x": x})[0].tolist()}


if __name__ == "__main__":
    model, port, models = sys.argv[1:]
    served = Echo() if model == "echo" else Onnx(model, f"{models}/{model}.onnx")
    server = kserve.ModelServer(
        http_port=int(port), enable_grpc=False, workers=1, access_log_format=None
    )
    server.start([served])
