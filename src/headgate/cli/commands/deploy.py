"""`headgate deploy`: packages an application and deploys it as a function."""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from headgate.cli.app_loading import load_app
from headgate.cli.options import OutputPath
from headgate.config import AppConfig
from headgate.core.errors import ConfigError, unknown_name_error
from headgate.deploy import LambdaFunction, Package, connect, deploy, pack, try_import
from headgate.deploy.lambda_function import is_local_lambda
from headgate.deploy.package import bundle, rough_size, write_dockerfile

HANDLER = "headgate.functions.lambda_handler.handle"


@click.group("deploy", no_args_is_help=False)
def command() -> None:
    """Deploy an application as a function."""


@command.command("lambda")
@click.argument("app", metavar="APP")
@click.option(
    "--function", "name", metavar="NAME", required=True, help="Name of the function to create."
)
@click.option("--endpoint-url", metavar="URL", help="URL of a local Lambda. Default: AWS.")
@click.option("--memory", "memory_mb", type=click.IntRange(128, 10_240), default=1_769)
@click.option("--timeout", "timeout_s", type=click.IntRange(1, 900), default=30)
@click.option("--role", metavar="ARN", help="Execution role of the function; AWS requires one.")
@click.option("--only", metavar="FUNCTION", help="Load only this function of APP at start.")
@click.option(
    "--include", metavar="GLOB", multiple=True, help="More files to pack, relative to APP."
)
@click.option("--bundle", "bundles", is_flag=True, help="Pack Headgate and its dependencies, too.")
@click.option("--handler", default=HANDLER, show_default=True)
@click.option("--zip", "zip_file", type=OutputPath(), help="Keep the package in this file.")
@click.option(
    "--directory", type=OutputPath(), help="Make a directory for a container image instead."
)
@click.option("--package-only", is_flag=True, help="Package and test-import only; create nothing.")
def deploy_lambda(
    app: str,
    name: str,
    endpoint_url: str | None,
    memory_mb: int,
    timeout_s: int,
    role: str | None,
    only: str | None,
    include: tuple[str, ...],
    bundles: bool,
    handler: str,
    zip_file: Path | None,
    directory: Path | None,
    package_only: bool,
) -> None:
    """Package APP as a function and create it, on AWS Lambda or on `headgate lambda-local`.

    \b
    headgate deploy lambda app.yaml --function resnet --bundle --role arn:aws:iam::...
    headgate deploy lambda app.yaml --function resnet --endpoint-url http://127.0.0.1:9001
    headgate deploy lambda app.yaml --function resnet --bundle --directory image/
    """
    config = _load(app, only)
    _check_name(name)
    _check_targets(zip_file, directory)
    creates = not package_only and (directory is None or is_local_lambda(endpoint_url))
    client = connect(endpoint_url) if creates else None  # first, because it is quick to fail
    environment = {"HEADGATE_APP": Path(app).name}
    if only is not None:
        environment["HEADGATE_FUNCTION"] = only
    is_zipped = directory is None
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-deploy-"))
        unfinished = stack.enter_context(ExitStack())
        if directory is not None:
            unfinished.callback(shutil.rmtree, directory, ignore_errors=True)
        target = directory or Path(scratch) / "package"
        package = pack(Path(app), config, target, include=include, is_zipped=is_zipped)
        if bundles:
            bundle(target, has_onnx=any(source and source.model for source in config.sources))
        codes = [source.code for source in config.sources if source and source.code]
        try_import(target, handler, environment, codes=codes)
        code: bytes | Path = target
        if is_zipped:
            code = package.zip_to(zip_file or Path(scratch) / "package.zip")
        else:
            write_dockerfile(package, name, handler, environment, is_bundled=bundles)
        function = LambdaFunction(name, handler, memory_mb, timeout_s, environment, code, role)
        verb = None if client is None else deploy(client, function, endpoint_url)
        unfinished.pop_all()
        _show(package, zip_file or directory)
    if verb is not None:
        click.echo(f"{verb} {name}: {memory_mb} MB, {timeout_s} s, {handler}")
    elif directory is not None:
        click.echo(f"build the image with: docker build {directory}")


def _load(app: str, only: str | None) -> AppConfig:
    if not app.endswith((".yaml", ".yml")):
        raise ConfigError("is not an application file", where=app, allowed="app.yaml")
    config = load_app(app)
    names = [function.name for function in config.app.functions]
    if only is not None and only not in names:
        raise unknown_name_error("function", only, names, where=app, key="--only")
    if not any(config.sources):
        problem = "has no function with `model` or `code` to deploy"
        raise ConfigError(problem, where=app)
    return config


def _check_name(name: str) -> None:
    if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name):
        allowed = "up to 64 letters, digits, - and _"
        raise ConfigError("is not a function name", where="deploy", key="--function", value=name,
                          allowed=allowed)  # fmt: skip


def _check_targets(zip_file: Path | None, directory: Path | None) -> None:
    if zip_file is not None and directory is not None:
        raise ConfigError("--zip and --directory exclude each other", where="deploy")
    if zip_file is not None and zip_file.suffix != ".zip":  # it may be a file that is to be packed
        raise ConfigError("is not a zip file", where=str(zip_file), key="--zip", allowed="f.zip")
    if zip_file is not None and (zip_file.is_dir() or not zip_file.parent.is_dir()):
        raise ConfigError("cannot be written", where=str(zip_file), key="--zip")
    if directory is not None:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError("exists already", where=str(directory), key="--directory")
        if not directory.parent.is_dir():
            raise ConfigError("cannot be created", where=str(directory), key="--directory")


def _show(package: Package, where: Path | None) -> None:
    files, size = package.files(), rough_size(package.size_bytes)
    click.echo(f"packed {len(files)} files, {size}" + (f": {where}" if where else ""))
