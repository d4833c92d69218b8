"""HTTP/1.1 for the gateway and for the Lambda emulator: connections, listening, limits."""
