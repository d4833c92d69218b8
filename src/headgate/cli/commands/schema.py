"""`headgate schema`: prints the JSON Schema of the application file, for editors."""

from __future__ import annotations

import click

from headgate.config.reference import schema_text


@click.command("schema")
@click.option("--json", is_flag=True, expose_value=False, help="Print JSON; this is always so.")
def command() -> None:
    """Print the JSON Schema of application files, for an editor that completes and checks.

    \b
    headgate schema > headgate.schema.json
    """
    click.echo(schema_text(), nl=False)
