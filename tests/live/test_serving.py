"""Ways to serve: a module, keys, TLS, reload, pipelines, memory budgets; and the event log."""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from served import Served, ask_on, run_headgate, run_json, until, value

STAGES = '''
import numpy as np

from headgate.functions import Model, function


@function(inputs={"x": "FP32[-1]"}, outputs={"x": "FP32[-1]"})
def doubled(x):
    return x * 2


class Sure(Model):
    """Sure of what is above 10."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]", "unsure": "BOOL[-1]"}

    def predict(self, batch):
        return {"y": batch["x"], "unsure": batch["x"] <= 10}


class Relay(Model):
    inputs = {"y": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def predict(self, batch):
        return {"y": batch["y"] + 100}


class Keeps(Model):
    """Keeps every input, and answers with the sums of all of them."""

    inputs = {"x": "FP32[-1]"}
    outputs = {"sums": "FP64[-1]"}
    batches = False

    def __init__(self):
        self.kept = []

    def predict(self, batch):
        self.kept.append(batch["x"])
        return {"sums": np.array([x.sum(dtype=np.float64) for x in self.kept])}


class Heavy(Model):
    inputs = {"x": "FP32[-1]"}
    outputs = {"y": "FP32[-1]"}

    def load(self):
        self.weights = np.ones(8_000_000)  # 64 MB

    def predict(self, batch):
        return {"y": batch["x"]}
'''


def served_app(directory: Path, text: str, *arguments: str) -> Served:
    (directory / "stages.py").write_text(STAGES)
    (directory / "app.yaml").write_text(text)
    return Served(directory, *arguments)


def test_application_in_python(tmp_path: Path) -> None:
    (tmp_path / "stages.py").write_text(STAGES)
    (tmp_path / "shop.py").write_text(
        "from headgate.config import declare\n"
        'app = declare(functions={"doubled": {"code": "stages:doubled"}}, pools={})\n'
    )
    with Served(tmp_path, app="shop:app") as served:
        assert value(served.ask("doubled", [21.0])[1]) == 42.0


def test_pipeline_and_its_event_log(tmp_path: Path) -> None:
    """Doubled twice; and every decision can be replayed."""
    app = (
        'functions: {doubled: {code: "stages:doubled"}}\n'
        "pipelines: {four: {stages: {a: {function: doubled}, "
        "b: {function: doubled, after: [a]}}}}\n"
    )
    with served_app(tmp_path, app, "--log", "run.log") as served:
        answers = served.ask_together("four", 8)
        assert [value(body) for _, body in answers] == [4.0 * number for number in range(8)]
    result = run_json(tmp_path, "replay", "run.log")
    assert result["is_identical"]
    assert result["complete"]


def test_cascade_runs_the_next_stage_only_if_unsure(tmp_path: Path) -> None:
    app = (
        'functions: {small: {code: "stages:Sure"}, large: {code: "stages:Relay"}}\n'
        "pipelines: {cascade: {stages: {small: {function: small}, "
        "large: {function: large, after: [small], only_if_unsure: true}}}}\n"
    )
    with served_app(tmp_path, app) as served:
        assert outputs(served.ask("cascade", [50.0])[1])["y"] == [50.0]
        assert outputs(served.ask("cascade", [5.0])[1])["y"] == [105.0]


def outputs(body: dict[str, object]) -> dict[str, object]:
    found = body["outputs"]
    assert isinstance(found, list)
    return {output["name"]: output["data"] for output in found}


def test_functions_are_swapped_in_limited_memory(tmp_path: Path) -> None:
    heavy = '{code: "stages:Heavy", memory: 70MB}'
    app = (
        f"functions: {{a: {heavy}, b: {heavy}, c: {heavy}}}\n"
        "pools: {local: {tier: dedicated, cpus: 1, memory: 200MB}}\n"
    )
    with served_app(tmp_path, app) as served:
        for _ in range(2):
            for name in "abc":
                status, body = served.ask(name, [1.0])
                assert status == 200, (body, served.errors())
        assert len(served.workers()) == 1
    assert "is killed" not in served.errors()


def test_inputs_kept_by_a_function_stay_valid(tmp_path: Path) -> None:
    """Large inputs are in shared memory, of which the gateway has little, and which it reuses."""
    app = (
        'functions: {keeps: {code: "stages:Keeps", exec_time: 1ms}}\n'
        "pools: {local: {tier: dedicated, nodes: 1, cpus: 1}}\n"
        "serve: {shared_memory: 256KiB}\n"
    )
    size = 8_000
    with served_app(tmp_path, app) as served:
        for number in range(1, 21):
            status, body = served.ask("keeps", [float(number)] * size)
            assert status == 200, body
        assert outputs(body)["sums"] == [float(size * n) for n in range(1, 21)]


def test_api_keys_and_tenants(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"open sesame").hexdigest()
    app = (
        'functions: {doubled: {code: "stages:doubled"}}\n'
        f'clients: {{ali: {{key: "sha256:{hashed}", rate: 1/min, burst: 2}}}}\n'
    )
    with served_app(tmp_path, app) as served:
        assert served.ask("doubled", [1.0])[0] == 401
        assert served.ask("doubled", [1.0], {"X-API-Key": "open wheat"})[0] == 401
        key = {"Authorization": "Bearer open sesame"}
        assert [served.ask("doubled", [1.0], key)[0] for _ in range(3)] == [200, 200, 429]
        assert served.get("/readyz")[0] == 200


@pytest.mark.parametrize("is_option", [False, True])
def test_tls(tmp_path: Path, is_option: bool) -> None:
    """Files that the application names are beside it; those of options in the working directory."""
    beside = tmp_path / "beside"
    beside.mkdir()
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 1 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1",
        shell=True,
        cwd=tmp_path if is_option else beside,
        check=True,
        capture_output=True,
    )
    (beside / "stages.py").write_text(STAGES)
    serve = "" if is_option else "serve: {tls_certificate: cert.pem, tls_key: key.pem}\n"
    (beside / "app.yaml").write_text(f'functions: {{doubled: {{code: "stages:doubled"}}}}\n{serve}')
    options = ("--tls-certificate", "cert.pem", "--tls-key", "key.pem") if is_option else ()
    with Served(tmp_path, *options, app="beside/app.yaml") as served:
        assert served.url.startswith("https://")
        address = urlsplit(served.url)
        certificate = (tmp_path if is_option else beside) / "cert.pem"
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection(
            address.hostname or "", address.port, context=context, timeout=60
        )
        assert ask_on(connection, "doubled", [4.0])[0] == 200
        connection.close()


def test_gpu_pools_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "stages.py").write_text(STAGES)
    (tmp_path / "app.yaml").write_text(
        'functions: {doubled: {code: "stages:doubled"}}\npools: {gpu: {tier: gpu}}\n'
    )
    done = run_headgate(tmp_path, "serve", "app.yaml", "--port", "0")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "pools.gpu: live GPU pools are not available yet" in done.stderr


def test_unreachable_slo_is_a_warning(misbehaving: Path) -> None:
    with Served(misbehaving, "--slo", "100ms") as served:
        assert served.ask("plain", [1.0])[0] == 200
    assert "slo.latency: '100ms': is below the critical path of pipeline slow" in served.errors()


def test_a_function_measured_on_a_busy_machine_is_served_all_the_same(tmp_path: Path) -> None:
    """It took a second when it was measured, and its objective is half of that.

    The machine is idle again before the first request comes. Nothing but that request could tell.
    """
    busy = tmp_path / "busy"
    busy.touch()
    (tmp_path / "code_at_start.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from headgate.functions import function\n"
        "@function(inputs={'x': 'FP32[-1]'})\n"
        "def f(x):\n"
        f"    time.sleep(1.0 if Path({str(busy)!r}).exists() else 0.0)\n"
        "    return x\n"
    )
    (tmp_path / "app.yaml").write_text(
        "functions: {f: {code: 'code_at_start:f', batch_max: 1}}\nslo: {latency: 500ms}\n"
    )
    with Served(tmp_path) as server:
        busy.unlink()
        # Some may be refused, and on a busy machine late; they are not refused for ever.
        assert until(lambda: [server.ask("f", [1.0])[0] for _ in range(3)] == [200] * 3)
        assert "is below the critical path" in server.errors()


def test_edited_file_is_reloaded(tmp_path: Path) -> None:
    """The edit has the size of the original and its second, as Python's caches compare them."""
    app = 'functions: {doubled: {code: "stages:doubled"}}\nserve: {lame_duck: 100ms}\n'
    with served_app(tmp_path, app, "--reload") as served:
        assert value(served.ask("doubled", [1.0])[1]) == 2.0
        stages, edited = tmp_path / "stages.py", tmp_path / "edited.py"
        edited.write_text(STAGES.replace("x * 2", "x * 3"))
        second = stages.stat().st_mtime_ns // 10**9
        os.utime(edited, ns=(second * 10**9 + 1, second * 10**9 + 1))
        edited.rename(stages)
        assert until(lambda: value(served.ask("doubled", [1.0])[1]) == 3.0)


def test_client_deadline_is_answered_by_a_timer(misbehaving: Path) -> None:
    """The worker is busy for 500 ms.

    A request with 550 ms gets its error then, and is never run.
    """
    with Served(misbehaving) as served:
        connection = served.connect()
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[7]}]}'
        connection.request("POST", "/v2/models/slow/infer", body)
        assert until((misbehaving / "ran.txt").exists)
        status, answer = served.ask("slow", [8.0], {"X-Request-Timeout-Ms": "550"})
        assert status in (429, 504)
        assert answer["reason"] in ("overloaded", "deadline_exceeded")
        assert served.ask("slow", [9.0], {"X-Request-Timeout-Ms": "10"})[0] in (200, 422, 504)
        assert connection.getresponse().status == 200
        connection.close()
