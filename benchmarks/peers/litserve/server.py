"""LitServe: one worker; batches of up to 8 within 5 ms for the models, none for the echo.

python server.py MODEL PORT MODELS
"""

import base64
import sys

import litserve
import numpy as np

SHAPES = {"cnn": (3, 64, 64), "wide": (256,), "slow": (3, 64, 64)}


class Echo(litserve.LitAPI):
    """Returns its input."""

    def setup(self, device):
        """Nothing to load."""

    def decode_request(self, request):
        """Decode the tensor from JSON."""
        return request["values"]

    def predict(self, x):
        """Return the input."""
        return x

    def encode_response(self, output):
        """Encode the tensor as JSON."""
        return {"values": output}


class Onnx(litserve.LitAPI):
    """A model with base64 in JSON: LitServe passes only JSON to its workers."""

    def __init__(self, path, shape, batch):
        super().__init__(max_batch_size=batch, batch_timeout=0.005)
        self.path, self.shape = path, shape

    def setup(self, device):
        """Load the model, in the worker."""
        import onnxruntime  # noqa: PLC0415  # not needed by the echo

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(self.path, options, providers=providers)

    def decode_request(self, request):
        """Decode the tensor from JSON."""
        return np.frombuffer(base64.b64decode(request["b64"]), np.float32).reshape(self.shape)

    def batch(self, inputs):
        """Stack the items of a batch."""
        return np.stack(inputs)

    def predict(self, x):
        """Run a batch."""
        return self.session.run(None, {"x": x})[0]

    def unbatch(self, output):
        """Split a batch into items."""
        return list(output)

    def encode_response(self, output):
        """Encode the output as JSON: it is small."""
        return {"values": output.tolist()}


if __name__ == "__main__":
    model, port, models = sys.argv[1:]
    batch = 2 if model == "slow" else 8  # batching does not help `slow`, whose SLO is 150 ms
    api = Echo() if model == "echo" else Onnx(f"{models}/{model}.onnx", SHAPES[model], batch)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(
        host="127.0.0.1",
        port=int(port),
        num_api_servers=1,
        log_level="error",
        access_log=False,
        generate_client_file=False,
    )
