"""`headgate init`: writes a small working project to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from shlex import quote

import click

from headgate.config.reference import schema_text
from headgate.core.errors import ConfigError


@click.command("init")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def command(directory: Path) -> None:
    """Write a working example project into DIR, which must be empty or new.

    \b
    headgate init hello
    cd hello
    headgate serve app.yaml
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            allowed = "a directory that is new or empty"
            raise ConfigError("is not an empty directory", where=str(directory), allowed=allowed)
        directory.mkdir(parents=True, exist_ok=True)
        for template in files("headgate.cli").joinpath("project").iterdir():
            if template.is_file():
                name = template.name.removesuffix(".template")
                (directory / name).write_bytes(template.read_bytes())
        (directory / "headgate.schema.json").write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError(problem, where=str(directory)) from None
    click.echo(f"{directory}: wrote app.yaml, sentiment.py and request.json. Next:")
    click.echo(f"  cd {quote(str(directory))}")
    click.echo("  headgate serve app.yaml")
    url = "http://127.0.0.1:8080/v2/models/sentiment/infer"
    click.echo(f"  curl -d @request.json {url}    # in another terminal")
