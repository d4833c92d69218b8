"""MLServer: in its own process (WORKERS=0) or with one worker; batches of up to 8 within 5 ms.

MLSERVER_PARALLEL_WORKERS=0 python server.py MODEL PORT MODELS
"""

import asyncio
import base64
import os
import sys

import numpy as np
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.settings import ModelParameters
from mlserver.types import InferenceResponse, ResponseOutput

SHAPES = {"cnn": (3, 64, 64), "wide": (256,), "slow": (3, 64, 64)}


class Echo(MLModel):
    """Returns its input."""

    async def load(self):
        """Nothing to load."""
        return True

    async def predict(self, payload):
        """Return the input."""
        given = payload.inputs[0]
        output = ResponseOutput(name="y", shape=given.shape, datatype="FP32", data=given.data)
        return InferenceResponse(model_name=self.name, outputs=[output])


class Onnx(MLModel):
    """A model with base64, the encoding of bytes in its REST protocol."""

    async def load(self):
        """Load the model."""
        import onnxruntime  # noqa: PLC0415  # not needed by the echo

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = self.settings.parameters.uri
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(path, options, providers=providers)
        return True

    async def predict(self, payload):
        """Run a batch, whose requests are the elements of one string tensor."""
        data = payload.inputs[0].data
        items = [data] if isinstance(data, str | bytes) else list(data)
        raw = b"".join(base64.b64decode(item) for item in items)
        x = np.frombuffer(raw, np.float32).reshape(-1, *SHAPES[self.name])
        y = self.session.run(None, {"x": x})[0]
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", y)])


async def main():
    """Serve one model."""
    model, port, models = sys.argv[1:]
    settings = Settings(
        host="127.0.0.1",
        http_port=int(port),
        grpc_port=int(port) + 1,
        metrics_port=int(port) + 2,
        parallel_workers=int(os.environ["WORKERS"]),
        use_structured_logging=False,
        debug=False,
    )
    # Batching does not help `slow`, whose SLO is 150 ms.
    has_none = model in ("echo", "slow")
    batches = {} if has_none else {"max_batch_size": 8, "max_batch_time": 0.005}
    served = ModelSettings(
        name=model,
        implementation=f"server.{'Echo' if model == 'echo' else 'Onnx'}",
        parameters=ModelParameters(uri=f"{models}/{model}.onnx"),
        **batches,
    )
    await MLServer(settings).start([served])


if __name__ == "__main__":
    asyncio.run(main())
