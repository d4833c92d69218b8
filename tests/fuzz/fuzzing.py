"""Shared by all fuzz targets: instruments Headgate, writes the seeds and starts libFuzzer.

A target is a script; it takes the options of libFuzzer and a directory that keeps the corpus:
`python tests/fuzz/http_bytes.py -max_total_time=60 corpus`. An input that crashes the target is
written to `crash-...` and can be passed as an argument to repeat the crash.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import FunctionType

RSS_MB_MAX = 1024  # more means that hostile input can make the target use unbounded memory
INPUT_BYTES_MAX = 8192


def fuzz(target: Callable[[bytes], None], seeds: Iterable[bytes]) -> None:
    """Fuzz the target, guided by coverage. Does not return."""
    # Imported by name: it has no types, and only this directory needs it.
    atheris = import_module("atheris")
    for thing in gc.get_objects():
        # Functions rather than imports: the target has imported them already.
        if isinstance(thing, FunctionType) and (thing.__module__ or "").startswith("headgate"):
            atheris.instrument_func(thing)
    with tempfile.TemporaryDirectory() as directory:
        for number, seed in enumerate(seeds):
            Path(directory, f"seed-{number}").write_bytes(seed)
        options = [f"-rss_limit_mb={RSS_MB_MAX}", f"-max_len={INPUT_BYTES_MAX}", "-timeout=60"]
        corpora = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        arguments = [argument for argument in sys.argv[1:] if argument.startswith("-")]
        is_replay = bool(corpora) and all(Path(path).is_file() for path in corpora)
        if not is_replay:
            corpora.append(directory)  # new inputs go to the first directory
        atheris.Setup([sys.argv[0], *options, *arguments, *corpora], target)
        atheris.Fuzz()
