"""The echo that is measured."""

from headgate.functions import Model


class Echo(Model):
    """Answer what was asked."""

    inputs = {"x": "FP32[-1, 8]"}  # noqa: RUF012
    outputs = {"y": "FP32[-1, 8]"}  # noqa: RUF012

    def predict(self, batch):
        """Change nothing."""
        return {"y": batch["x"]}
