"""The CPUs of a shape are the threads of its batches: which models a worker loads for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.config import AppConfig, declare
from headgate.functions.loader import LoadedFunction, load_function
from headgate.functions.model import OnnxModel
from headgate.live.ipc.crash_markers import CrashMarkers
from headgate.live.ray_host.actor import RayActor, decode_load
from headgate.live.worker.__main__ import library_threads
from headgate.live.worker.model_cache import Loader, LoadError, ModelCache

CODE = """
from headgate.functions import Model, function
log = []
class Told(Model):
    def __init__(self, threads=0):
        self.threads = threads
    def load(self):
        if self.threads == 3:
            raise OSError("three are too many")
        log.append(self.threads)
    def unload(self):
        log.append(-self.threads)
class Untold(Model):
    def load(self): log.append("load")
    def unload(self): log.append("unload")
@function
def plain(x, threads=0):
    log.append(threads)
    return x
"""


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shaped_code.py").write_text(CODE)
    yield tmp_path
    sys.modules.pop("shaped_code", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def app_of(
    name: str,
    cpus: Sequence[float],
    pool: Mapping[str, object] | None = None,
    **more: object,
) -> AppConfig:
    """One function with shapes of these CPUs, on nodes of four."""
    source = {"model": name} if name.endswith(".onnx") else {"code": f"shaped_code:{name}"}
    shapes = [{"cpus": count, "exec_time": "1ms"} for count in cpus]
    return declare(
        functions={"it": {**source, **shapes[0], "shapes": shapes[1:], **more}},
        pools={"cpu": {"tier": "dedicated", "cpus": 4, "slots": 4, **(pool or {})}},
    )


def cache_of(config: AppConfig, base: Path, cores: int = 4) -> ModelCache:
    loader = Loader(config.app, config.sources, str(base), 0, CrashMarkers(base))
    return ModelCache(config.app, config.app.pools[0], loader, cores=cores)


def log() -> list[Any]:
    found: list[Any] = sys.modules["shaped_code"].log
    return found


def test_a_function_is_loaded_for_every_shape_where_the_dispatch_chooses_it(base: Path) -> None:
    """One model for each number of threads; parts of a CPU take a whole thread."""
    config = app_of("Told", [1, 0.5, 2, 3.5])
    (variant,) = config.app.variants
    cache = cache_of(config, base)
    loaded = cache.acquire(variant)
    assert log() == [1, 2, 4]
    threads = [loaded.on(cache.cores_of(variant, id)).model.threads for id in range(4)]  # type: ignore[attr-defined]
    assert threads == [1, 1, 2, 4]
    cache.release(variant, loaded, keep=False)
    assert log()[3:] == [-1, -2, -4]


@pytest.mark.parametrize("compute", ["per_instance", "resident"])
def test_an_instance_with_a_shape_is_loaded_for_that_shape(base: Path, compute: str) -> None:
    config = app_of("Told", [1, 2], {"compute": compute})
    (variant,) = config.app.variants
    cache = cache_of(config, base)
    small, large = cache.acquire(variant), cache.acquire(variant, 1)
    assert log() == [1, 2]
    cache.release(variant, large, keep=True)
    assert not cache.has(variant)
    assert cache.has(variant, 1)
    assert cache.acquire(variant) is not large
    assert cache.acquire(variant, 1) is large
    assert small.core_counts == (1,)


def test_no_more_threads_than_the_process_has_cores(base: Path) -> None:
    """Both shapes are the same then, and there is one model."""
    config = app_of("Told", [2, 4])
    (variant,) = config.app.variants
    assert cache_of(config, base, cores=2).acquire(variant).core_counts == (2,)
    assert log() == [2]


def test_a_function_without_cpus_is_told_nothing(base: Path) -> None:
    config = app_of("Told", [0])
    loaded = cache_of(config, base).acquire(config.app.variants[0])
    assert loaded.core_counts == (0,)
    assert log() == [0]


def test_an_option_of_the_application_prevails(base: Path) -> None:
    config = app_of("Told", [1, 2], options={"threads": 7})
    loaded = cache_of(config, base).acquire(config.app.variants[0])
    assert log() == [7]
    assert loaded.on(1) is loaded.on(2)


def test_a_model_that_takes_no_threads_is_loaded_once(base: Path) -> None:
    config = app_of("Untold", [1, 2])
    loaded = cache_of(config, base).acquire(config.app.variants[0])
    assert loaded.on(1) is loaded.on(2)
    loaded.unload()
    assert log() == ["load", "unload"]


def test_a_python_function_is_told_its_threads(base: Path) -> None:
    config = app_of("plain", [1, 2])
    loaded = cache_of(config, base).acquire(config.app.variants[0])
    for cores in (1, 2):
        loaded.on(cores).model.predict({"x": np.zeros(1)})
    assert log() == [1, 2]


def test_models_that_were_loaded_before_a_failure_are_unloaded(base: Path) -> None:
    config = app_of("Told", [1, 3, 4])
    with pytest.raises(LoadError, match="OSError: three are too many"):
        cache_of(config, base).acquire(config.app.variants[0])
    assert log() == [1, -1]


def threads_of(loaded: LoadedFunction, cores: int) -> int:
    model = loaded.on(cores).model
    assert isinstance(model, OnnxModel)
    count: int = model._session.get_session_options().intra_op_num_threads
    return count


def test_onnx_sessions_have_the_threads_of_their_shapes(base: Path) -> None:
    """As the session says, and as the kernel counts: the calling thread is one of them."""
    pytest.importorskip("onnxruntime")
    write_identity(base / "it.onnx")
    config = app_of("it.onnx", [1, 3])
    (variant,) = config.app.variants
    app, sources = config.app, config.sources
    one = load_function(app, sources, str(base), variant, (1,))  # imports ONNX Runtime
    before = kernel_threads()
    three = load_function(app, sources, str(base), variant, (3,))
    assert kernel_threads() - before == 2
    both = load_function(app, sources, str(base), variant, (1, 3))
    assert kernel_threads() - before == 4
    assert [threads_of(one, 1), threads_of(three, 3)] == [1, 3]
    assert [threads_of(both, cores) for cores in (1, 3)] == [1, 3]
    for loaded in (one, three, both):
        loaded.unload()
    assert kernel_threads() == before


def kernel_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def write_identity(path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(name, kind, ["n", 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "it", [x], [y])
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), path)


def test_a_ray_actor_has_the_threads_of_its_shape(base: Path) -> None:
    config = app_of("Told", [1, 2], {"compute": "resident"})
    for shape_id in (0, 1):
        assert not decode_load(RayActor(config.spec, str(base), 0, shape_id).load()).problem
    assert log() == [1, 2]


@pytest.mark.parametrize(
    ("cpus", "threads"), [([1], 1), ([1, 2], 2), ([0], 4), ([1, 0], 4), ([4, 8], 4)]
)
def test_libraries_have_the_threads_of_the_largest_shape(cpus: list[float], threads: int) -> None:
    config = app_of("Untold", cpus, {"cpus": 8})
    assert library_threads(config.app, 0, cores=4) == threads


def test_a_worker_sets_its_threads_before_it_imports_numpy() -> None:
    """NumPy's libraries read their number of threads, and the cores, when they are imported."""
    program = "import sys, headgate.live.worker.__main__; print('numpy' in sys.modules)"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
