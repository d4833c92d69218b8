"""`headgate schema`: what an application file may contain, for editors and other tools."""

from __future__ import annotations

import click

from headgate.config.schema import schema_text


@click.command("schema")
@click.option("--json", is_flag=True, expose_value=False, help="Print JSON, as it always does.")
def command() -> None:
    """Print the JSON Schema of APP, for an editor that completes and checks.

    \b
    headgate schema > headgate.schema.json
    """
    click.echo(schema_text(), nl=False)
