"""The gRPC front end of the Open Inference Protocol."""
