"""The Open Inference Protocol over HTTP: JSON, the binary extension, the inference route."""
