"""What all fuzz targets share: instrument Headgate, write the seeds, hand over to libFuzzer.

A target is run by hand, with any of libFuzzer's options and perhaps a directory to keep a corpus
in: `python tests/fuzz/http_bytes.py -max_total_time=60 corpus`. What breaks it is written to
`crash-...` and can be given back as an argument.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import FunctionType

RSS_MB_MAX = 1024  # a target that holds more has no bound on what hostile input makes it keep
INPUT_BYTES_MAX = 8192


def fuzz(target: Callable[[bytes], None], seeds: Iterable[bytes]) -> None:
    """Run the target on ever new inputs that reach ever new code. Does not return."""
    # By name: it has no types, and only this directory needs it.
    atheris = import_module("atheris")
    for thing in gc.get_objects():
        # Functions rather than imports: the target has imported them already.
        if isinstance(thing, FunctionType) and (thing.__module__ or "").startswith("headgate"):
            atheris.instrument_func(thing)
    with tempfile.TemporaryDirectory() as directory:
        for number, seed in enumerate(seeds):
            Path(directory, f"seed-{number}").write_bytes(seed)
        options = [f"-rss_limit_mb={RSS_MB_MAX}", f"-max_len={INPUT_BYTES_MAX}", "-timeout=60"]
        kept = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        given = [argument for argument in sys.argv[1:] if argument.startswith("-")]
        is_replay = bool(kept) and all(Path(path).is_file() for path in kept)
        corpora = kept if is_replay else [*kept, directory]  # new inputs go to the first
        atheris.Setup([sys.argv[0], *options, *given, *corpora], target)
        atheris.Fuzz()
