"""The environment of instances: documented by AWS or set by the function, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from platform_rig import platform_in

from headgate.lambda_emulator.instance import RESERVED_VARIABLES
from headgate.system.process import thread_variables

SEES = """
import os


def handle(event, context):
    return dict(os.environ)
"""
OURS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEXAMPLETOKEN",
    "AWS_SHARED_CREDENTIALS_FILE": "/ours/credentials",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://ours/",
    "HEADGATE_PLATFORM_ACCESS_KEY_ID": "OURKEYID",
    "HEADGATE_PLATFORM_SECRET_ACCESS_KEY": "our-secret-of-the-platform",
    "DATABASE_PASSWORD": "hunter2",
    "HTTPS_PROXY": "http://ours:1",
    "PYTHONSTARTUP": "/ours/startup.py",
}
INHERITED = {"PATH", "LD_LIBRARY_PATH", "TMPDIR"}
SET = {"LANG", "LC_CTYPE", "TZ", "PYTHONPATH", "AWS_DEFAULT_REGION", *thread_variables(1)}


def test_instances_get_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only search paths are inherited from the platform's environment."""
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)
    with platform_in(tmp_path) as (_, caller):
        caller.create("sees", SEES, Environment={"Variables": {"COLOUR": "red"}})
        result: dict[str, str] = caller.invoke("sees").body
    assert result["COLOUR"] == "red"
    assert not set(result.values()) & set(OURS.values())
    assert set(result) <= INHERITED | SET | RESERVED_VARIABLES | {"COLOUR"}
