"""LitServe: one worker; batches of up to 8 within 5 ms for the models, none for the echo.

python server.py MODEL PORT MODELS
"""

import base64
import sys

import litserve
import numpy as np

SHAPES = {"cnn": (3, 64, 64), "wide": (256,), "slow": (3, 64, 64)}


class Echo(litserve.LitAPI):
    """Answer what was asked."""

    def setup(self, device):
        """Nothing to load."""

    def decode_request(self, request):
        """Take the tensor out of the JSON."""
        return request["values"]

    def predict(self, x):
        """Change nothing."""
        return x

    def encode_response(self, output):
        """Put it back."""
        return {"values": output}


class Onnx(litserve.LitAPI):
    """A model behind base64 in JSON: a worker is only ever given JSON."""

    def __init__(self, path, shape, batch):
        super().__init__(max_batch_size=batch, batch_timeout=0.005)
        self.path, self.shape = path, shape

    def setup(self, device):
        """Load the model, in the worker."""
        import onnxruntime  # noqa: PLC0415  # the echo does without

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(self.path, options, providers=providers)

    def decode_request(self, request):
        """Take the tensor out of the JSON."""
        return np.frombuffer(base64.b64decode(request["b64"]), np.float32).reshape(self.shape)

    def batch(self, inputs):
        """Put the items of a batch together."""
        return np.stack(inputs)

    def predict(self, x):
        """Run a batch."""
        return self.session.run(None, {"x": x})[0]

    def unbatch(self, output):
        """Take them apart again."""
        return list(output)

    def encode_response(self, output):
        """The answer is small: plain JSON."""
        return {"values": output.tolist()}


if __name__ == "__main__":
    model, port, models = sys.argv[1:]
    batch = 2 if model == "slow" else 8  # batches gain it nothing, and it has 150 ms for everything
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
