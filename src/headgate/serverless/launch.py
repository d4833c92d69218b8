"""How an instance is started: the command, and the environment that AWS promises."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import headgate
from headgate.serverless.cpu import THREAD_VARIABLES, threads
from headgate.serverless.function import FunctionVersion
from headgate.serverless.settings import Settings

# Set by the platform for every function: AWS refuses functions that want to set them.
RESERVED: Final = frozenset(
    (
        "_HANDLER",
        "_X_AMZN_TRACE_ID",
        "AWS_REGION",
        "AWS_EXECUTION_ENV",
        "AWS_LAMBDA_FUNCTION_NAME",
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE",
        "AWS_LAMBDA_FUNCTION_VERSION",
        "AWS_LAMBDA_INITIALIZATION_TYPE",
        "AWS_LAMBDA_LOG_GROUP_NAME",
        "AWS_LAMBDA_LOG_STREAM_NAME",
        "AWS_LAMBDA_RUNTIME_API",
        "LAMBDA_TASK_ROOT",
        "LAMBDA_RUNTIME_DIR",
    )
)

# The runtime of AWS, in a process that does not outlive the platform: the kernel kills it when the
# platform's thread is gone, and if that was already so when it asked for this, it ends itself.
_START: Final = """
import ctypes, os, runpy, signal, sys
platform = int(sys.argv.pop(1))
sys.path[0] = os.getcwd()
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == platform:
    runpy.run_module("awslambdaric", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of one instance, whose Runtime API is on the given port."""

    function: FunctionVersion
    settings: Settings
    port: int
    is_provisioned: bool

    @property
    def command(self) -> tuple[str, ...]:
        """The runtime of AWS, as a plain process."""
        return (sys.executable, "-c", _START, str(os.getpid()), self.function.handler)

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of ours but what `Settings.inherits` names: AWS gives a clean one as well."""
        function, region = self.function, self.settings.region
        root = str(function.code.directory)
        inherited = {
            name: os.environ[name] for name in self.settings.inherits if name in os.environ
        }
        count = str(threads(self.settings.vcpus(function.memory_mb)))
        start = "provisioned-concurrency" if self.is_provisioned else "on-demand"
        return {
            **inherited,
            **dict.fromkeys(THREAD_VARIABLES, count),
            "LANG": "C.UTF-8",
            "TZ": ":UTC",
            "PYTHONPATH": os.pathsep.join((root, _beside_headgate())),
            "AWS_DEFAULT_REGION": region,
            **function.environment,
            "_HANDLER": function.handler,
            "AWS_REGION": region,
            "AWS_EXECUTION_ENV": f"AWS_Lambda_{function.runtime}",
            "AWS_LAMBDA_FUNCTION_NAME": function.name,
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function.memory_mb),
            "AWS_LAMBDA_FUNCTION_VERSION": function.version,
            "AWS_LAMBDA_INITIALIZATION_TYPE": start,
            "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{function.name}",
            "AWS_LAMBDA_LOG_STREAM_NAME": f"[{function.version}]{self.port}",
            "AWS_LAMBDA_RUNTIME_API": f"127.0.0.1:{self.port}",
            "LAMBDA_TASK_ROOT": root,
            "LAMBDA_RUNTIME_DIR": root,
        }


def _beside_headgate() -> str:
    """Where Headgate is imported from, so that a function need not bring it along."""
    return str(Path(headgate.__file__).resolve().parents[1])
