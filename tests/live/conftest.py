"""An application whose functions misbehave on demand."""

from __future__ import annotations

from pathlib import Path

import pytest

FUNCTIONS = '''
import ctypes
import os
import time
from pathlib import Path

import numpy as np

from headgate.functions import Model


class Numbers(Model):
    """One number in, one out; every execution leaves a line in `ran.txt`."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def example(self):
        return {"x": np.array([-1], np.float32)}

    def predict(self, batch):
        with Path(__file__).with_name("ran.txt").open("a") as file:
            file.writelines(f"{value:g}\\n" for value in batch["x"] if value >= 0)
        for value in batch["x"]:
            self.meet(float(value))
        return {"y": batch["x"] * 2}

    def meet(self, value):
        pass


class Slow(Numbers):
    def meet(self, value):
        if value >= 0:
            time.sleep(0.5)


class Hangs(Numbers):
    """666 hangs, and nobody else can run: the lock on the interpreter is held."""

    def meet(self, value):
        if value == 666:
            ctypes.PyDLL(None).sleep(1000)


class Loops(Numbers):
    def meet(self, value):
        while value == 666:
            time.sleep(0.01)


class Eats(Numbers):
    def meet(self, value):
        if value == 666:
            self.eaten = []
            for _ in range(4000):
                self.eaten.append(np.ones(1_000_000))
                time.sleep(0.002)


class Raises(Numbers):
    def meet(self, value):
        if value == 666:
            raise ArithmeticError("of all numbers, this one")
'''

APP = """
functions:
  plain: {code: "misbehaving:Numbers", batch_max: 4}
  slow: {code: "misbehaving:Slow", batch_max: 1, exec_time: 500ms}
  once: {code: "misbehaving:Slow", batch_max: 1, exec_time: 500ms, idempotent: false}
  hangs: {code: "misbehaving:Hangs", batch_max: 1, exec_time: 1ms}
  loops: {code: "misbehaving:Loops", batch_max: 1, exec_time: 1ms}
  eats: {code: "misbehaving:Eats", batch_max: 1, exec_time: 1ms}
  raises: {code: "misbehaving:Raises", exec_time: {1: 1ms, 4: 1ms}}
pools:
  local: {tier: dedicated, nodes: 1, cpus: 1, memory: 700MB}
limits: {attempts_max: 2}
serve: {lame_duck: 300ms, drain: 20s, execution_timeout: 2s}
"""


@pytest.fixture
def misbehaving(tmp_path: Path) -> Path:
    (tmp_path / "misbehaving.py").write_text(FUNCTIONS)
    (tmp_path / "app.yaml").write_text(APP)
    return tmp_path
