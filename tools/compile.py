"""Builds Headgate with mypyc: the same source, as C extensions, in a directory of its own.

    python tools/compile.py [--out DIR]

copies `src` to DIR/src (build/compiled/src), compiles the hot modules in place there and prints
that directory: with it on PYTHONPATH, Headgate is compiled. The source tree is left alone. Nothing
is done when the last build was of the very same sources. Needs mypy and a C compiler, which
spends most of the time on `-O3`; what was built needs `mypy_extensions`, which comes with mypy.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Reading and writing text gains nothing from being compiled. Errors have subclasses in modules that
# are not compiled, which cannot extend a compiled class.
INTERPRETED = frozenset(
    ("core/errors.py", "core/event_log.py", "core/request_trace.py", "core/units.py")
)
# What a simulated request passes through; the rest of `sim` runs once per run.
SIM = (
    "engine",
    "event_queue",
    "faas",
    "gateways",
    "ground_truth",
    "host",
    "node",
    "recorder",
    "shared_pools",
)
# What policies and simulated platforms call for every task.
PLANNING = (
    "admission/control",
    "admission/cost_budgets",
    "admission/feasibility",
    "admission/refusals",
    "admission/shares",
    "admission/spillover",
    "constants",
    "forecast",
    "dispatch/batching",
    "dispatch/busy_nodes",
    "dispatch/calls",
    "dispatch/next_batch",
    "dispatch/placement",
    "dispatch/provisioning",
    "dispatch/shapes",
    "dispatch/task_queues",
    "pools/build",
    "pools/builds",
    "pools/calendar",
    "pools/node_lanes",
    "pools/warm_pool",
    "rivals/dag_placements",
    "rivals/dag_promises",
)
# What a request passes through in a gateway, but for the records of msgspec: no compiled class can
# extend those, and their fields are read as fast from either.
LIVE = (
    "http/connection",
    "live/cost_accounting",
    "live/driver",
    "live/event_log",
    "live/gateway/context",
    "live/gateway/http/request",
    "live/gateway/http/server",
    "live/gateway/inference",
    "live/gateway/oip/http",
    "live/gateway/oip/json",
    "live/gateway/tenants",
    "live/ipc/worker_link",
    "live/runtime",
)
# A class that is not compiled cannot extend one that is, so policies elsewhere are compiled too.
POLICIES_ELSEWHERE = ("lab/regret/references",)
# Of what comes and goes with every request, the memory of the last object that was freed is used
# for the next one.
REUSED = {
    "core/actions": ("Dispatch", "Settle"),
    "core/events": ("BatchFinished", "RequestArrived"),
    "core/records": ("Batch", "Request", "Task"),
    "planning/pools/build": ("Promise",),
    "planning/dispatch/batching": ("Send",),
    "sim/node": ("NodeJob",),
}


def main() -> None:
    """Build, if need be, and say where."""
    parser = argparse.ArgumentParser(description="Build Headgate with mypyc.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "compiled")
    print(build(parser.parse_args().out))


def build(out: Path) -> Path:
    """Return the directory that holds the compiled package, built of the present sources."""
    stamp = out / "sources.sha256"
    digest = _digest()
    if not stamp.exists() or stamp.read_text() != digest:
        work = out.with_name(f"{out.name}.{os.getpid()}")  # nobody ever sees half a build
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(ROOT / "src", work / "src", ignore=shutil.ignore_patterns("__pycache__"))
        _mark_reused(work / "src" / "headgate")
        _compile(work)
        (work / stamp.name).write_text(digest)
        shutil.rmtree(out, ignore_errors=True)
        work.rename(out)
    return out / "src"


def hot_modules(package: Path) -> list[Path]:
    """Return the modules that are compiled: core, policies, the simulator's loop, the gateway's."""
    found = [*(package / "core").rglob("*.py"), *(package / "policies").glob("*.py")]
    found += [package / "planning" / f"{name}.py" for name in PLANNING]
    found += [package / "sim" / f"{name}.py" for name in SIM]
    found += [package / f"{name}.py" for name in (*LIVE, *POLICIES_ELSEWHERE)]
    return sorted(
        path
        for path in found
        if path.name != "__init__.py" and path.relative_to(package).as_posix() not in INTERPRETED
    )


def _digest() -> str:
    """Whatever the result depends on: the sources, this file and the tools."""
    digest = hashlib.sha256(f"{sys.version} {version('mypy')}".encode())
    digest.update(str(sysconfig.get_config_var("EXT_SUFFIX")).encode())
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


def _mark_reused(package: Path) -> None:
    """Tell mypyc in a copy of the sources which objects to reuse: interpreted code need not know.

    A traceback of the compiled build names lines of the copy.
    """
    for module, names in REUSED.items():
        path = package / f"{module}.py"
        text = path.read_text()
        for name in names:
            mark = f"@mypyc_attr(free_list_len=1)\nclass {name}"
            text, count = re.subn(rf"^class {name}\b", mark, text, flags=re.MULTILINE)
            assert count == 1, f"{module} has no class {name}"
        after = "from __future__ import annotations\n"
        path.write_text(text.replace(after, f"{after}from mypy_extensions import mypyc_attr\n", 1))


def _compile(work: Path) -> None:
    """Run mypyc over a copy of the sources, in a process of its own: it changes directory."""
    paths = [str(path.relative_to(work)) for path in hot_modules(work / "src" / "headgate")]
    done = subprocess.run(
        [sys.executable, "-c", _SETUP, *paths],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"mypyc failed:\n{done.stdout}\n{done.stderr}")


_SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup

extensions = mypycify(sys.argv[1:], opt_level="3", debug_level="0")
for extension in extensions:
    # All modules are one library: nobody else calls or replaces its functions. Otherwise each call
    # would go through a table, and none would be inlined. Those of Python's library are called
    # without a detour through the linker's table.
    extension.extra_compile_args += ["-fvisibility=hidden", "-fno-plt"]
setup(
    name="headgate",
    packages=[],
    package_dir={"": "src"},
    ext_modules=extensions,
    script_args=["--quiet", "build_ext", "--inplace"],
)
"""


if __name__ == "__main__":
    main()
