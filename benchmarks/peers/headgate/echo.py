"""The echo model of the benchmark."""

from headgate.functions import Model


class Echo(Model):
    """Returns its input."""

    inputs = {"x": "FP32[-1, 8]"}  # noqa: RUF012
    outputs = {"y": "FP32[-1, 8]"}  # noqa: RUF012

    def predict(self, batch):
        """Return the input."""
        return {"y": batch["x"]}
