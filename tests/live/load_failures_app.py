"""An application with functions that fail to load, each for another reason, and a healthy one."""

from __future__ import annotations

from pathlib import Path

from served import Served

CODE = '''
import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np

from headgate.functions import Model

HERE = Path(__file__).parent


class Healthy(Model):
    """Each load leaves a line in `loads.txt`."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def load(self):
        with (HERE / "loads.txt").open("a") as file:
            file.write(f"{type(self).__name__} {os.getpid()}\\n")
        if not (HERE / "fixed").exists():
            self.break_down()

    def break_down(self):
        pass

    def predict(self, batch):
        return {"y": batch["x"] * 2}


class Raises(Healthy):
    def break_down(self):
        raise OSError("there is no secret/weights")


class Exits(Healthy):
    def break_down(self):
        sys.exit("enough")


class Dies(Healthy):
    def break_down(self):
        os._exit(0)


class Crashes(Healthy):
    def break_down(self):
        ctypes.string_at(0)


class Hangs(Healthy):
    def break_down(self):
        time.sleep(1000)


class HoldsTheInterpreter(Healthy):
    def break_down(self):
        ctypes.PyDLL(None).sleep(1000)


class Eats(Healthy):
    def break_down(self):
        self.eaten = []
        while True:
            self.eaten.append(np.ones(1_000_000))
'''
# The problem of each function, as shown to any client.
KINDS = {
    "Raises": "OSError",
    "Exits": "SystemExit",
    "Dies": "ProcessDied",
    "Crashes": "ProcessDied",
    "Hangs": "TimeoutError",
    "HoldsTheInterpreter": "TimeoutError",
    "Eats": "MemoryError",
}


def write_app(directory: Path, *classes: str, nodes: int = 1) -> Path:
    """Write an application of these functions: of class `Raises`, `raises`, and so on."""
    timeout = "5s" if "Eats" in classes else "300ms"  # to eat takes a while on a busy machine
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "loads.py").write_text(CODE)
    functions = "\n".join(
        f'  {name.lower()}: {{code: "loads:{name}", exec_time: 1ms, idempotent: true}}'
        for name in classes
    )
    (directory / "app.yaml").write_text(
        f"functions:\n{functions}\n"
        f"pools: {{cpu: {{tier: dedicated, nodes: {nodes}, cpus: 1, memory: 400MB}}}}\n"
        f"serve: {{lame_duck: 0s, drain: 5s, execution_timeout: {timeout}}}\n"
    )
    return directory


def loads(directory: Path, name: str) -> list[int]:
    """The processes in which a class was loaded, one entry per load."""
    path = directory / "loads.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[1]) for line in lines if line.split()[0] == name]


def mend(served: Served) -> None:
    """Make everything loadable from now on."""
    (served.directory / "fixed").touch()
