"""`headgate key`: makes an API key, and its hash for the application file."""

from __future__ import annotations

import hashlib
import secrets

import click

from headgate.cli.options import json_option
from headgate.cli.output import show_json


@click.command("key")
@json_option
def command(as_json: bool) -> None:
    """Make an API key for a client: the key itself, and its hash for the application file.

    The key is printed once and not stored.
    """
    key = f"hg_{secrets.token_urlsafe(32)}"
    hashed = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    if as_json:
        show_json({"key": key, "hash": hashed})
    else:
        click.echo(f"key   {key}   give it to the client")
        click.echo(f"hash  {hashed}   put it into the file: clients.NAME.key")
