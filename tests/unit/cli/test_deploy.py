"""`headgate deploy lambda` and `headgate lambda-local`: from an application file to a call."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from cli_rig import headgate, write

from headgate.lambda_emulator import EmbeddedPlatform, client_options

APP = """
functions: {double: {code: "mine:double"}}
slo: {latency: 100ms}
"""
MINE = """
import numpy as np
from headgate.functions import function


@function(inputs={"x": "FP32[-1]"}, outputs={"y": "FP32[-1]"})
def double(x):
    return {"y": x * 2}
"""


@pytest.fixture(scope="module", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Key files of emulators in tests are not left in the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests never see the AWS credentials of the user who runs them."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@pytest.fixture
def app(tmp_path: Path) -> str:
    """An application with a function in Python, and with what must not be packed."""
    home = tmp_path / "home"
    (home / "more").mkdir(parents=True)
    (home / ".venv").mkdir()
    write(home / "mine.py", MINE)
    write(home / "more" / "words.py", "WORD = 'more'\n")
    write(home / ".venv" / "huge.py", "")
    write(home / "secret.txt", "not for anybody")
    return write(home / "app.yaml", APP)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPlatform]:
    with EmbeddedPlatform(tmp_path_factory.mktemp("platform")) as platform:
        yield platform


def error_line(*arguments: object) -> str:
    """Return the error line of a command that must be refused."""
    ended = headgate(*arguments)
    lines = ended.err.splitlines()
    assert (ended.code, ended.out, len(lines)) == (2, "", 1), ended
    return lines[0].removeprefix("headgate: error: ")


def call(platform: EmbeddedPlatform, name: str) -> list[float]:
    """Double two numbers with a deployed function."""
    data = base64.b64encode(struct.pack("<2f", 1.5, 2.0)).decode()
    task = [1, 2, [["x", "FP32", [2], data]]]  # id, items, inputs
    event = {"headgate": 2, "function": "double", "tasks": [task]}
    client = boto3.client("lambda", **platform.client_options)
    response = client.invoke(FunctionName=name, Payload=json.dumps(event).encode())
    answer = json.loads(response["Payload"].read())
    client.close()
    assert "FunctionError" not in response, answer
    ((_, ((_, _, _, outputs),), *_),) = answer["results"]
    return list(struct.unpack("<2f", base64.b64decode(outputs)))


def test_deploying_and_calling(platform: EmbeddedPlatform, app: str, tmp_path: Path) -> None:
    """The function is created, called, and updated by the same command; nothing else is packed."""
    kept = tmp_path / "package.zip"
    to = ("--function", "double", "--endpoint-url", platform.url)
    ended = headgate("deploy", "lambda", app, *to, "--zip", kept, "--timeout", 20)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[-1].startswith("created double: 1769 MB, 20 s")
    with zipfile.ZipFile(kept) as archive:
        assert sorted(archive.namelist()) == ["app.yaml", "mine.py", "more/words.py"]
    assert call(platform, "double") == [3.0, 4.0]

    mine = Path(app).with_name("mine.py")
    write(mine, MINE.replace("* 2", "* 10"))
    ended = headgate("deploy", "lambda", app, *to, "--memory", 3_538, "--only", "double")
    assert ended.out.splitlines()[-1].startswith("updated double: 3538 MB, 30 s"), ended
    assert call(platform, "double") == [15.0, 20.0]


def test_a_directory_for_an_image(platform: EmbeddedPlatform, app: str, tmp_path: Path) -> None:
    """The directory has a Dockerfile; the emulator runs it as it is."""
    target = tmp_path / "image"
    to = ("--function", "from-image", "--directory", target)
    ended = headgate("deploy", "lambda", app, *to, "--endpoint-url", platform.url)
    assert ended.code == 0, ended
    dockerfile = (target / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["python", "-m", "awslambdaric"]' in dockerfile
    assert "ENV HEADGATE_APP=app.yaml" in dockerfile
    assert call(platform, "from-image") == [3.0, 4.0]
    line = error_line("deploy", "lambda", app, *to)
    assert line == f"{target}: --directory: exists already"


def test_packing_is_the_same_every_time(app: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one.zip", tmp_path / "two.zip"
    to = ("--function", "f", "--package-only")
    assert headgate("deploy", "lambda", app, *to, "--zip", one).code == 0
    os.utime(app)
    ended = headgate("deploy", "lambda", app, *to, "--zip", two, "--include", "*.txt")
    assert ended.out == f"packed 4 files, {_size(app)}B: {two}\n"
    assert headgate("deploy", "lambda", app, *to, "--zip", two).code == 0
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ("import nothing_of_this_name\n", "ModuleNotFoundError: No module named 'nothing_of_thi"),
        ("def (:\n", "SyntaxError: invalid syntax"),
        ("raise SystemExit\n", "it exits"),
        ("import os; os._exit(0)\n", "the process exits with 0"),
    ],
)
def test_code_that_does_not_import(app: str, mine: str, message: str) -> None:
    """Whatever keeps the handler from starting is reported, and nothing is created."""
    write(Path(app).with_name("mine.py"), mine)
    line = error_line("deploy", "lambda", app, "--function", "f", "--package-only")
    assert "cannot be imported" in line or "cannot be imported" in line
    assert message in line or mine.startswith("raise")


def test_what_does_not_import_is_not_created(platform: EmbeddedPlatform, app: str) -> None:
    """The platform is asked for nothing before the package has been imported here."""
    mark = Path(app).with_name("imported")
    write(Path(app).with_name("mine.py"), f"open({str(mark)!r}, 'w')\nimport no_such_module\n")
    to = ("--function", "never", "--endpoint-url", platform.url)
    assert "no_such_module" in error_line("deploy", "lambda", app, *to)
    assert mark.exists()
    boto = boto3.client("lambda", **platform.client_options)
    listed = [each["FunctionName"] for each in boto.list_functions()["Functions"]]
    boto.close()
    assert "never" not in listed


def test_a_handler_that_is_not_there(app: str) -> None:
    to = ("--function", "f", "--package-only", "--handler", "mine.handle")
    line = error_line("deploy", "lambda", app, *to)
    message = "cannot be imported: ImportError: module 'mine' has no function 'handle'"
    assert line == f"deploy: handler: 'mine.handle': {message}"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{exec_time: 5ms}", "has no function with `model` or `code`"),
        ("{model: none.onnx}", "functions.double.model: 'none.onnx': is not a file"),
        ("{model: ../up.onnx}", "functions.double.model: '../up.onnx': is outside"),
    ],
)
def test_applications_that_cannot_be_packed(app: str, written: str, message: str) -> None:
    write(Path(app), f"functions: {{double: {written}}}\npools: {{cpu: {{nodes: 1}}}}\n")
    line = error_line("deploy", "lambda", app, "--function", "f", "--package-only")
    assert line.startswith(f"{app}: {message}"), line


def test_missing_boto3_credentials_and_roles(
    app: str, platform: EmbeddedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials, a platform that answers, a function of APP, boto3 itself."""
    to = ("deploy", "lambda", app, "--function", "f")
    assert error_line(*to).startswith("deploy: no credentials for AWS were found (allowed: ")
    assert error_line(*to, "--only", "dubble").startswith(
        f"{app}: --only: 'dubble': unknown function, did you mean double?"
    )
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        assert "Could not connect to the endpoint URL" in error_line(*to, "--endpoint-url", url)
    line = error_line(*to, "--endpoint-url", "nonsense")
    assert line.startswith(
        "deploy: --endpoint-url: 'nonsense': is not a valid URL (allowed: http://"
    )
    to_platform = (*to, "--endpoint-url", platform.url, "--include")
    assert error_line(*to_platform, "*.none").endswith("--include: '*.none': matches no file")
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert error_line(*to) == "deploy: boto3 is not installed: pip install boto3"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--include", "../secret"), "deploy: --include: '../secret': is not a pattern"),
        (("--include", "/etc/hosts"), "deploy: --include: '/etc/hosts': is not a pattern"),
        (("--include", ""), "deploy: --include: '': is not a pattern"),
        (("--zip", "app.yaml"), "app.yaml: --zip: is not a zip file"),
        (
            ("--endpoint-url", "http://[::1"),
            "deploy: --endpoint-url: 'http://[::1': is not a valid",
        ),
        (
            ("--endpoint-url", "http://a:b"),
            "deploy: --endpoint-url: 'http://a:b': is not a valid URL",
        ),
        (("--endpoint-url", ""), "deploy: --endpoint-url: '': is not a valid URL"),
        (("--function", "a\nRUN b"), "deploy: --function: 'a\\nRUN b': is not a function name"),
    ],
)
def test_harmful_options_are_refused(
    app: str, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    """Nothing outside of the package is read or written, least of all the application."""
    monkeypatch.chdir(Path(app).parent)
    before = Path(app).read_text()
    packs = () if options[0] == "--endpoint-url" else ("--package-only",)
    line = error_line("deploy", "lambda", "app.yaml", "--function", "f", *packs, *options)
    assert line.startswith(message)
    assert Path(app).read_text() == before


def test_a_directory_beside_the_working_one(app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed import leaves no directory that would block the next try."""
    home = Path(app).parent
    monkeypatch.chdir(home)
    (home / "loop").symlink_to(home)
    to = ("deploy", "lambda", app, "--function", "f", "--package-only", "--directory", "image")
    mine = (home / "mine.py").read_text()
    write(home / "mine.py", "import nothing_of_this_name\n")
    assert "cannot be imported" in error_line(*to)
    write(home / "mine.py", mine)
    ended = headgate(*to)
    assert (ended.code, ended.err) == (0, "")
    assert (home / "image" / "mine.py").is_file() and not (home / "image" / "loop").exists()


def test_a_package_that_is_too_large(app: str) -> None:
    """The file is sparse: it takes no space on the disk, and no time."""
    with Path(app).with_name("weights.bin").open("wb") as file:
        file.truncate(300_000_000)
    to = ("--function", "f", "--package-only", "--include", "*.bin")
    line = error_line("deploy", "lambda", app, *to)
    assert line.startswith("deploy: the package is 300MB unpacked (allowed: up to 250MiB; ")


def test_a_bundle_that_cannot_be_made(app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an index there is nothing to install from, and the error is that of pip."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    line = error_line("deploy", "lambda", app, "--function", "f", "--package-only", "--bundle")
    assert line.startswith("deploy: --bundle: No matching distribution found for ")


def test_lambda_local_as_a_process(tmp_path: Path) -> None:
    """It prints its URL, serves boto3, ends on SIGTERM, and prints what ran."""
    command = (sys.executable, "-m", "headgate", "lambda-local", "--port", "0")
    process = subprocess.Popen(
        (*command, "--directory", tmp_path / "data", "--concurrency", "3", "--keep-alive", "1min"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout:
        url = process.stdout.readline().split()[1]
        lines = [process.stdout.readline() for _ in range(6)]  # until the keys are there
        assert lines[-1].startswith("  billing log: ")
        client = boto3.client("lambda", **client_options(url))
        assert client.get_account_settings()["AccountLimit"]["ConcurrentExecutions"] == 3
        client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout.read().endswith("0 calls, 0.000 GB-s\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep-alive", "10"), "--keep-alive: '10': needs a unit"),
        (("--keep-alive", "0s"), "--keep-alive: '0s': must be longer than zero"),
        (("--cpus", "all"), "--cpus: 'all': is not a list of CPUs"),
        (("--cpus", "9999"), "platform: cpus: (9999,): not available to this process"),
        (("--host", "256.0.0.1"), "256.0.0.1:0: cannot listen"),
        (("--host", "0.0.0.0", "--no-auth"), "--host 0.0.0.0: --no-auth would let anyone"),
        (("--keys-file", "/dev/null/keys"), "/dev/null/keys: the keys cannot be written: F"),
    ],
)
def test_invalid_options_of_lambda_local(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    line = error_line("lambda-local", "--port", 0, "--directory", tmp_path / "data", *options)
    assert line.startswith(message)


def _size(app: str) -> int:
    home = Path(app).parent
    names = ("app.yaml", "mine.py", "more/words.py", "secret.txt")
    return sum((home / name).stat().st_size for name in names)
