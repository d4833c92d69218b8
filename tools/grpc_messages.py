"""Compiles the messages of the gRPC front end, after a change of `open_inference.proto`.

    python tools/grpc_messages.py

Needs grpcio-tools, which is a tool of developers: serving reads only the compiled descriptor set.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "src/headgate/live/gateway/grpc"
SOURCE = FOLDER / "open_inference.proto"
COMPILED = SOURCE.with_suffix(".binpb")


def compiled() -> bytes:
    """The descriptor set of the source, without comments and places in the source."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}"]
        command += [f"--descriptor_set_out={out}", SOURCE.name]
        subprocess.run(command, check=True)
        return out.read_bytes()


if __name__ == "__main__":
    COMPILED.write_bytes(compiled())
