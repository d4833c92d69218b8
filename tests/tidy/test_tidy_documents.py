"""Commands in documents do what the documents say: they are run, in a copy of the repository.

In a block fenced as `console`, every line after `$ ` is a command and what follows is what it
prints; in one fenced as `bash`, every line is a command. What a block prints is compared line by
line, in order, with numbers and white space set aside and `...` for anything; a comment
`<!-- exact -->` on the line before the fence compares it to the letter. A comment
`<!-- needs: minutes -->` (or a cloud, a cluster, a gpu, a model) keeps a block from being run. A
block after `<!-- file: NAME -->` is that file, which the commands that follow may use; one after
`<!-- edit: NAME -->` is an edit of that file, with `+` and `-` before lines. With
`<!-- recorded: FILE as NAME -->` a block goes on with a file that was measured on an idle machine,
so that the rest does not depend on how busy this one is. A command that ends in `&` goes on in the
background, once it has printed what it should, to the end of its document.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tidy_sources import DISCOVERED, PACKAGE, ROOT, kept_files, name_of, tree

NEEDS = frozenset(("cloud", "cluster", "gpu", "minutes", "model"))
BIN = Path(sys.executable).parent
USED = ("<!-- file: ", "<!-- recorded: ", "<!-- edit: ")  # blocks that commands need
TIMEOUT_S = 600
PORT = re.compile(r"(?<=--port )\d{4}|(?<=127\.0\.0\.1:)\d{4}|(?<=port: )\d{4}")
DOCUMENTS = sorted(path for path in kept_files() if path.suffix == ".md")


@dataclass
class Command:
    """A line to run, where it stands, and what it should print (None: whatever)."""

    text: str
    line: int
    expected: list[str] | None
    is_exact: bool = False


@dataclass
class Block:
    """A fenced block and the comment before it."""

    language: str
    mark: str
    line: int
    lines: list[str] = field(default_factory=list)


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document."""
    found: list[Block] = []
    inside: Block | None = None
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        if inside is not None:
            if line.strip() == "```":
                inside = None
            else:
                inside.lines.append(line)
        elif line.startswith("```"):
            inside = Block(line[3:].strip(), before, number)
            found.append(inside)
        before = line.strip()
    assert inside is None, "a fence is not closed"
    return found


def commands(block: Block) -> list[Command]:
    """What a block wants to be run; nothing if it is marked as needing something."""
    needs = re.fullmatch(r"<!-- needs: (\w+) -->", block.mark)
    if needs is not None:
        assert needs[1] in NEEDS, f"line {block.line}: unknown need {needs[1]!r}"
        return []
    is_exact = block.mark == "<!-- exact -->"
    found: list[Command] = []
    for offset, line in enumerate(block.lines, 1):
        if found and found[-1].text.endswith("\\"):
            found[-1].text = f"{found[-1].text[:-1]}{line.strip()}"
        elif block.language == "console" and line.startswith("$ "):
            found.append(Command(line[2:], block.line + offset, [], is_exact))
        elif block.language == "bash" and line.strip() and not line.startswith("#"):
            found.append(Command(line, block.line + offset, None))
        elif block.language == "console" and found and found[-1].expected is not None:
            found[-1].expected.append(line)
    return found


def loose(line: str) -> str:
    """A line without its numbers and its alignment, which may differ from run to run."""
    return re.sub(r"\s+|─+", " ", re.sub(r"[0-9][0-9.,e+-]*", "#", line)).strip()


def missing(expected: list[str], printed: list[str]) -> str | None:
    """The first expected line that was not printed after the one before it."""
    rest = iter(printed)
    for line in expected:
        if line and line != "..." and line not in rest:
            return line
    return None


def on_free_ports(text: str) -> str:
    """A document with a free port for each that it names: somebody else may use those."""
    with ExitStack() as held:
        free: dict[str, str] = {}
        for port in set(PORT.findall(text)):
            listener = held.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            free[port] = str(listener.getsockname()[1])
    return PORT.sub(lambda found: free[found[0]], text)


def make_edit(path: Path, block: Block) -> None:
    """Change a file as a block says: lines with a space stay, with `-` go, with `+` are new."""
    assert {line[:1] for line in block.lines} <= {" ", "-", "+"}, f"line {block.line}"
    before = "".join(f"{line[1:]}\n" for line in block.lines if line[0] != "+")
    after = "".join(f"{line[1:]}\n" for line in block.lines if line[0] != "-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"line {block.line}: {path} has another text"
    path.write_text(text.replace(before, after), encoding="utf-8")


def check_out(tmp_path: Path) -> Path:
    """Make a copy of the repository, with the environment that runs the tests as its own."""
    for path in kept_files():
        target = tmp_path / "headgate" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    (tmp_path / "headgate" / ".venv").symlink_to(BIN.parent)
    if not (BIN / "headgate").exists():  # the package is on the path but was never installed
        shim = tmp_path / "bin" / "headgate"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m headgate "$@"\n', encoding="utf-8")
        shim.chmod(0o755)
    return tmp_path / "headgate"


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Commands end on SIGINT, also where the tests run in the background of a shell.

    Such a shell has it ignored, what it runs inherits that, and the platform of functions, which
    respects it, would have to be killed after a minute. A handler is not inherited.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
@pytest.mark.usefixtures("heeded_interrupts")
@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_run(document: Path, tmp_path: Path) -> None:
    found = blocks(on_free_ports(document.read_text(encoding="utf-8")))
    if not any(block.mark.startswith(USED) or commands(block) for block in found):
        return  # two documents of three: a copy of the repository takes longer than the rest
    checkout = check_out(tmp_path)
    with ExitStack() as background:
        for block in found:
            file = re.fullmatch(r"<!-- file: (\S+) -->", block.mark)
            if file is not None:
                (checkout / file[1]).write_text("\n".join([*block.lines, ""]), encoding="utf-8")
            recorded = re.fullmatch(r"<!-- recorded: (\S+) as (\S+) -->", block.mark)
            if recorded is not None:
                shutil.copy(ROOT / recorded[1], checkout / recorded[2])
            edit = re.fullmatch(r"<!-- edit: (\S+) -->", block.mark)
            if edit is not None:
                make_edit(checkout / edit[1], block)
            for command in commands(block):
                where = f"{name_of(document)}:{command.line}: {command.text}"
                if command.text.endswith("&"):
                    background.enter_context(_in_background(command, checkout, where))
                else:
                    _run(command, checkout, where)


def test_every_kind_that_is_discovered_has_an_example() -> None:
    """One file for each: the page runs them, so that they are found by their place is true."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    files = re.findall(r"<!-- file: src/headgate/(\S+)/\w+\.py -->", text)
    assert sorted(files) == sorted(DISCOVERED)
    assert re.findall(r"^\| .+? \| `src/headgate/(\S+)/` \| ", text, re.MULTILINE) == files
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        assert (PACKAGE / path).exists(), path


@pytest.mark.parametrize(
    ("section", "edits_max"), [("A setting of `serve:`", 2), ("A field of a rejection", 3)]
)
def test_a_change_takes_few_edits(section: str, edits_max: int) -> None:
    """Each is new lines in one place; `test_commands_run` makes them and sees what follows."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    _, _, after = text.partition(f"\n## {section}\n")
    edits = [
        block
        for block in blocks(after.partition("\n## ")[0])
        if block.mark.startswith("<!-- edit: ")
    ]
    assert 1 <= len(edits) <= edits_max
    for edit in edits:
        assert len(re.findall(r"\++", "".join(line[0] for line in edit.lines))) == 1


def test_what_follows_from_the_schema_is_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "reference.py"))
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert tool["written"](text) == text, "run python tools/reference.py"


def test_the_parser_of_documents() -> None:
    """What is run, what is not, and what counts as printed."""
    run = "```console\n$ a \\\n  b\nx 1\n$ c\n```\n"
    not_run = "<!-- needs: gpu -->\n```bash\nd\n```\n```\ne\n```\n"
    first, second, third = blocks(run + not_run)
    assert [(c.text, c.expected) for c in commands(first)] == [("a b", ["x 1"]), ("c", [])]
    assert commands(second) == commands(third) == []
    assert missing([loose("x 1.5"), "...", "z"], [loose("x   22"), "y", "z"]) is None
    assert missing(["z", "x"], ["x", "z"]) == "x"
    _, first_port, _, second_port = on_free_ports("--port 8081 port: 8081").split()
    assert first_port == second_port != "8081"


def _run(command: Command, checkout: Path, where: str) -> None:
    if command.text.startswith("make ") and not (BIN.parent / ".ready").exists():
        return  # this environment was not made by `make`, which would make it anew
    done = subprocess.run(
        command.text,
        shell=True,
        cwd=checkout,
        env=_environment(checkout),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{where}\n{done.stdout}"
    if command.expected is not None:
        _compare(command, command.expected, done.stdout, where)


def _environment(checkout: Path) -> dict[str, str]:
    return os.environ | {
        "PATH": os.pathsep.join((str(BIN), str(checkout.parent / "bin"), os.environ["PATH"])),
        "PYTHONPATH": str(checkout / "src"),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "100",
    }


@contextmanager
def _in_background(command: Command, checkout: Path, where: str) -> Iterator[None]:
    printed = checkout.parent / f"background-{command.line}.txt"
    with printed.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            f"exec {command.text.removesuffix('&')}",
            shell=True,
            cwd=checkout,
            env=_environment(checkout),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        expected = [loose(line) for line in command.expected or ()]
        end_s = time.monotonic() + TIMEOUT_S
        while missing(expected, [loose(line) for line in printed.read_text().splitlines()]):
            is_hopeless = process.poll() is not None or time.monotonic() > end_s
            assert not is_hopeless, f"{where}\n{printed.read_text()}"
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _compare(command: Command, expected: list[str], printed: str, where: str) -> None:
    if command.is_exact:
        assert printed.strip() == "\n".join(expected).strip(), where
        return
    first = missing([loose(e) for e in expected], [loose(p) for p in printed.splitlines()])
    assert first is None, f"{where}\nnot printed: {first}\n{printed}"


def test_the_walk_of_a_request_names_what_exists() -> None:
    text = (ROOT / "docs" / "life-of-a-request.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| \d+ \| .+? \| `(\S+\.py)` \| `([\w.]+)` \|$", text, re.MULTILINE)
    live, simulated = text.split("The same request, simulated:")
    assert len(re.findall(r"^\| \d+ \|", live, re.MULTILINE)) <= 28, "a request's walk is short"
    assert len(re.findall(r"^\| \d+ \|", simulated, re.MULTILINE)) > 5
    for path, name in steps:
        body: list[ast.stmt] = tree(PACKAGE / path).body
        for part in name.split("."):
            named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            found = [node for node in body if isinstance(node, named) and node.name == part]
            assert found, f"{path} has no {name}"
            body = found[0].body
    methods = {
        f"{owner.name}.{method.name}"
        for path in PACKAGE.rglob("*.py")
        for owner in ast.walk(tree(path))
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef)
    }
    rows = re.findall(r"^\| \d+ \| (.+?) \| `", live, re.MULTILINE)
    mentioned = {name for row in rows for name in re.findall(r"`(\w+\.\w+)`", row)}
    assert mentioned and mentioned <= methods


def test_the_glossary_names_modules_that_exist() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| `(\S+)` \|$", text, re.MULTILINE)
    assert len(rows) > 50
    assert not [path for _, _, path in rows if not (PACKAGE / path).is_file()]
    terms = [term for term, _, _ in rows]
    assert len(terms) == len(set(terms)), "a term is explained twice"


def test_documents_name_files_that_exist() -> None:
    """Where a module has moved, documents follow; the changelog keeps the names of its time."""
    roots = (ROOT, PACKAGE, ROOT / "tests")
    lost = [
        f"{document.relative_to(ROOT)}: {name}"
        for document in DOCUMENTS
        if document.name != "CHANGELOG.md"
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", document.read_text(encoding="utf-8"))
        if not any((root / name).is_file() for root in roots)
    ]
    assert not lost
