"""The ensemble and the cascade of `examples/images`, live, beside the same pipelines in Ray Serve.

Servers take turns, round after round, and get the same pictures. One request at a time says what a
server adds to a request: its latency less the time that the models themselves take, which is
measured in this process before every round, on one thread. Of the models that run side by side, the
slowest one counts. Several connections say how much a server can do. Only ratios within a round
count, because machines are noisy.

The cascade is sent a picture of which the small model is sure, and another of which it is not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import msgspec
import yaml
from numpy.typing import NDArray

from headgate.config.source import read_yaml
from headgate.core.errors import ConfigError
from headgate.core.model import OBSERVE
from headgate.lab.bench.live import CACHE
from headgate.lab.bench.live.load_driver import LoadMeasurement, drive, driver_name, is_correct
from headgate.lab.bench.live.server_process import (
    NotInstalledError,
    Peer,
    ServerError,
    python_of,
    read_peers,
    running,
)
from headgate.lab.experiments import Check, Progress, Result, Row
from headgate.loadgen.requests import Body, fetch, parse_address

NAME = "pipelines"
TITLE = "an ensemble and a cascade of live models, compared with Ray Serve"

# Relative to the repository root, as those of `bench live`.
PEERS_FILE = Path("benchmarks/peers/pipelines.yaml")
EXAMPLE = Path("examples/images")
ENSEMBLE: Final = "ensemble"
SURE: Final = "cascade, sure"
UNSURE: Final = "cascade, unsure"
CASES: Final = (ENSEMBLE, SURE, UNSURE)
ROUNDS: Final = 3
SECONDS: Final = 4.0
CONNECTIONS: Final = (8, 32)
_RATIO_MIN: Final = 2.0  # of the overhead in Ray Serve to ours
_BARE_S: Final = 1.0
_PICTURES: Final = 20  # among which a sure one and an unsure one are found
_SEED: Final = 5
_SOURCE: Final = "docs/benchmarks.md"

Arrays = NDArray[Any]
Steps = Sequence[Sequence[str]]  # models one after the other, or side by side

# By case: the models that a request goes through.
STEPS: Final[Mapping[str, Steps]] = {
    ENSEMBLE: (("resize",), ("edges", "shapes", "texture"), ("vote",)),
    SURE: (("resize",), ("small",)),
    UNSURE: (("resize",), ("small",), ("large",)),
}


@dataclass(frozen=True, slots=True)
class PictureCase:
    """A picture that a pipeline is sent, and the probabilities that are right."""

    name: str
    image: Arrays
    expected: list[float]

    @property
    def pipeline(self) -> str:
        return self.name.partition(",")[0]

    def body(self, encoding: str) -> Body:
        """Return the request, with the picture as raw bytes."""
        content = self.image.tobytes()
        headers = {"Content-Type": "application/octet-stream"}
        if encoding == "raw":
            return Body(content, headers)
        tensor = {"name": "image", "datatype": "UINT8", "shape": list(self.image.shape)}
        document = {
            "inputs": [{**tensor, "parameters": {"binary_data_size": len(content)}}],
            "outputs": [{"name": "probabilities", "parameters": {"binary_data": True}}],
        }
        head = json.dumps(document).encode()
        length = {"Inference-Header-Content-Length": str(len(head))}
        return Body(head + content, headers | length)


@dataclass(frozen=True, slots=True)
class CaseMeasurement:
    """One server, one case, one round."""

    peer: str
    case: str
    round: int
    models_ms: float  # what the models take by themselves
    single: LoadMeasurement  # one request at a time
    busy: Mapping[int, LoadMeasurement]  # by connections

    @property
    def overhead_ms(self) -> float:
        """What the server adds to the median latency of one request at a time."""
        return self.single.p50_ms - self.models_ms


@dataclass(slots=True)
class PipelinesResult:
    """All measurements, and why others are missing."""

    ours: str
    rivals: tuple[str, ...]  # the servers whose overhead is compared with ours
    measured: list[CaseMeasurement] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # by server
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])  # of other processes


class Models:
    """The models of the example in this process, on one thread each."""

    def __init__(self, folder: Path) -> None:
        try:
            import onnxruntime  # noqa: PLC0415  # optional dependency
        except ImportError:
            raise ConfigError("the models need onnxruntime: pip install headgate[onnx]") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        names = {name for steps in STEPS.values() for step in steps for name in step}
        self._sessions = {
            name: onnxruntime.InferenceSession(
                str(folder / f"{name}.onnx"), options, providers=["CPUExecutionProvider"]
            )
            for name in sorted(names)
        }

    def run(self, name: str, values: Mapping[str, Arrays]) -> dict[str, Arrays]:
        """Run a model on the inputs that it takes of these values; return its outputs by name."""
        session = self._sessions[name]
        outputs = [output.name for output in session.get_outputs()]
        inputs = {each.name: values[each.name] for each in session.get_inputs()}
        return dict(zip(outputs, session.run(outputs, inputs), strict=True))

    def answer(self, case: str, image: Arrays) -> tuple[dict[str, Arrays], dict[str, float]]:
        """Return all values of a request, and the time of each model in milliseconds."""
        values: dict[str, Arrays] = {"image": image}
        took_ms: dict[str, float] = {}
        for step in STEPS[case]:
            found: dict[str, Arrays] = {}
            for name in step:
                begin_s = perf_counter()
                found |= self.run(name, values)
                took_ms[name] = 1e3 * (perf_counter() - begin_s)
            values |= found
        return values, took_ms

    def measure_ms(self, case: PictureCase, seconds: float) -> float:
        """Return the time of a request in the models alone: of each its median."""
        took: list[dict[str, float]] = []
        end_s = perf_counter() + seconds
        while not took or perf_counter() < end_s:
            took.append(self.answer(case.name, case.image)[1])
        medians = {name: median(each[name] for each in took) for name in took[0]}
        return critical_path_ms(STEPS[case.name], medians)


def critical_path_ms(steps: Steps, model_ms: Mapping[str, float]) -> float:
    """Return the time of all steps; of models side by side, the slowest counts.

    >>> critical_path_ms((("a",), ("b", "c")), {"a": 1.0, "b": 2.0, "c": 4.0})
    5.0
    """
    return sum(max(model_ms[name] for name in step) for step in steps)


def find_cases(models: Models, images: Arrays) -> list[PictureCase]:
    """Return a case of each kind: the first picture of which the small model is, or is not, sure.

    Raises `ConfigError` if there is none.
    """
    sure: dict[bool, Arrays] = {}
    for image in images:
        values, _ = models.answer(SURE, image[None])
        sure.setdefault(not values["unsure"][0], image[None])
    if len(sure) < 2:
        raise ConfigError("no picture of which the small model is sure and one of which it is not")
    chosen = {ENSEMBLE: sure[True], SURE: sure[True], UNSURE: sure[False]}
    cases = []
    for name, image in chosen.items():
        probabilities = models.answer(name, image)[0]["probabilities"]
        cases.append(PictureCase(name, image, [float(value) for value in probabilities.ravel()]))
    return cases


def run(*, progress: Progress) -> Result:
    """Measure all servers. Takes about eight minutes, and longer the first time."""
    return report(measure(progress, rounds=ROUNDS, seconds=SECONDS))


def measure(progress: Progress, *, rounds: int, seconds: float) -> PipelinesResult:
    """Run the servers in turn, round after round. Raises `ConfigError` outside the repository."""
    peers = read_peers(PEERS_FILE)
    folder = CACHE / "pipelines"
    write_apps(folder)
    models = Models(folder)
    cases = find_cases(models, example_pictures(folder / "pictures.py", _PICTURES))
    (ours,) = [peer.name for peer in peers if peer.is_ours]
    rivals = tuple(peer.name for peer in peers if not peer.is_ours and peer.group == peer.name)
    result = PipelinesResult(ours, rivals)
    pythons: dict[str, Path] = {}
    for peer in peers:
        progress(f"installing {peer.name}")
        try:
            pythons[peer.name] = python_of(peer.requirements, CACHE, peer.folder.name)
        except NotInstalledError as error:
            result.missing[peer.name] = f"not installed: {error}"
    for number in range(rounds):
        bare_ms = {case.name: models.measure_ms(case, min(_BARE_S, seconds)) for case in cases}
        for peer in peers:
            for pipeline in peer.models:
                if peer.name in result.missing:
                    continue
                progress(f"round {number + 1} of {rounds}: {peer.name}, {pipeline}")
                sent = [case for case in cases if case.pipeline == pipeline]
                try:
                    for case, found in _measure(peer, pythons[peer.name], folder, sent, seconds):
                        single, *others = found
                        busy = dict(zip(CONNECTIONS, others, strict=True))
                        one = (peer.name, case.name, number, bare_ms[case.name])
                        result.measured.append(CaseMeasurement(*one, single, busy))
                except ServerError as error:
                    result.missing[peer.name] = str(error)
    return result


def write_apps(folder: Path) -> None:
    """Copy the example, and write its applications so that nothing is rejected.

    Ray Serve answers everything, however late, and so must Headgate where the two are compared.
    """
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    for pipeline, source in (("ensemble", "parallel"), ("cascade", "cascade")):
        app = msgspec.convert(read_yaml(str(EXAMPLE / f"{source}.yaml")), dict[str, object])
        app["limits"] = {"admission": OBSERVE}
        path = folder / f"{pipeline}-admitting.yaml"
        path.write_text(yaml.safe_dump(app), encoding="utf-8")


def _measure(
    peer: Peer, python: Path, folder: Path, cases: Sequence[PictureCase], seconds: float
) -> Iterator[tuple[PictureCase, list[LoadMeasurement]]]:
    """Serve a pipeline; yield the measurements of its cases, one connection first."""
    first = cases[0]
    route = peer.models[first.pipeline]
    body = first.body(route.body)
    with running(peer, first.pipeline, python, folder, body, first.expected) as server:
        address = parse_address(server.url)
        for case in cases:
            body = case.body(route.body)
            status, content = fetch(address, "POST", address.path, body)
            if status != 200 or not is_correct(content, case.expected):
                raise ServerError(f"{case.name}: no correct response: status {status}")
            yield case, [drive(server.url, body, each, seconds) for each in (1, *CONNECTIONS)]


def example_pictures(path: Path, count: int) -> Arrays:
    """Return pictures that no model was fitted to, made by the example's own code."""
    spec = importlib.util.spec_from_file_location("example_pictures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    images: Arrays = module.pictures(count, _SEED)[0]
    return images


def report(result: PipelinesResult) -> Result:
    """Return the medians over the rounds, and the ratios within a round."""
    peers, missing = dict.fromkeys(each.peer for each in result.measured), result.missing
    rows = [_row(result, case, peer) for case in CASES for peer in peers if peer not in missing]
    rows += [{"server": peer, "missing": reason} for peer, reason in result.missing.items()]
    return Result(NAME, [*rows, _machine_row(result)], list(_checks(result)))


def _of(result: PipelinesResult, case: str, peer: str) -> list[CaseMeasurement]:
    return [each for each in result.measured if (each.case, each.peer) == (case, peer)]


def _row(result: PipelinesResult, case: str, peer: str) -> Row:
    runs = _of(result, case, peer)
    rates = {
        f"{connections} connections [1/s]": round(
            median(run.busy[connections].requests_per_s for run in runs)
        )
        for connections in CONNECTIONS
    }
    every = [each for run in runs for each in (run.single, *run.busy.values())]
    return {
        "pipeline": case,
        "server": peer,
        "models ms": round(median(run.models_ms for run in runs), 3),
        "p50 ms": round(median(run.single.p50_ms for run in runs), 3),
        "p99 ms": round(median(run.single.p99_ms for run in runs), 3),
        "overhead ms": round(median(run.overhead_ms for run in runs), 3),
        "requests per s": round(median(run.single.requests_per_s for run in runs)),
        **rates,
        "errors": sum(each.errors for each in every),
    }


def _machine_row(result: PipelinesResult) -> Row:
    """How disturbed the measurement was: processes that wanted to run in the minute before it."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load average before": round(result.load_before, 2),
        "load generator": driver_name(),
    }


def _checks(result: PipelinesResult) -> Iterator[Check]:
    expected = f"at least {_RATIO_MIN:g}x"
    for case in CASES:
        for rival in result.rivals:
            claim = f"{case}: overhead of {rival} over that of {result.ours}"
            reason = result.missing.get(rival) or result.missing.get(result.ours)
            if reason is not None:
                yield Check(claim, _SOURCE, expected, reason, holds=False)
                continue
            ratio = overhead_ratio(_of(result, case, rival), _of(result, case, result.ours))
            yield Check(claim, _SOURCE, expected, f"{ratio:.1f}x", ratio >= _RATIO_MIN)
    errors = sum(
        each.errors for run in result.measured for each in (run.single, *run.busy.values())
    )
    yield Check("requests that were not answered with 200", _SOURCE, 0, errors, errors == 0)


def overhead_ratio(theirs: Sequence[CaseMeasurement], ours: Sequence[CaseMeasurement]) -> float:
    """Return the median over rounds of their overhead over ours.

    An overhead below a microsecond is noise, and counts as one.
    """
    return median(
        max(1e-3, one.overhead_ms) / max(1e-3, other.overhead_ms)
        for one, other in zip(theirs, ours, strict=True)
    )
