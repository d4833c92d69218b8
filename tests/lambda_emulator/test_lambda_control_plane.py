"""Creating, changing and deleting functions with boto3, as AWS documents it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from platform_rig import HANDLER, ROLE, Caller, eventually, zipped

from headgate.core.errors import ConfigError
from headgate.lambda_emulator import EmbeddedPlatform
from headgate.lambda_emulator.functions import RUNTIME

ANOTHER = "def handle(event, context):\n    return 'another'\n"


def test_function_lifecycle(caller: Caller) -> None:
    """Create, get, invoke, update code, invoke, update configuration, invoke, delete."""
    boto = caller.boto
    created = caller.create(
        "life", Timeout=60, MemorySize=1_024, Environment={"Variables": {"COLOUR": "red"}}
    )
    assert created["FunctionArn"] == "arn:aws:lambda:us-east-1:000000000000:function:life"
    assert (created["Version"], created["State"]) == ("$LATEST", "Active")
    assert (created["Timeout"], created["MemorySize"], created["Handler"]) == (
        60,
        1_024,
        "module.handle",
    )
    boto.get_waiter("function_active_v2").wait(FunctionName="life")

    description = boto.get_function(FunctionName="life")
    assert description["Configuration"]["CodeSha256"] == created["CodeSha256"]
    assert description["Configuration"]["Environment"] == {"Variables": {"COLOUR": "red"}}
    request = {"env": ["COLOUR", "AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "OMP_NUM_THREADS"]}
    first = caller.invoke("life", request).body
    assert list(first["env"].values()) == ["red", "1024", "1"]
    assert 30_000 < first["left_ms"] <= 60_000

    changed = boto.update_function_code(
        FunctionName="life", ZipFile=zipped({"module.py": HANDLER + "\n"})
    )
    assert changed["CodeSha256"] != created["CodeSha256"]
    second = caller.invoke("life", {"note": 2}).body
    assert second["pid"] != first["pid"], "the instance still runs the old code"
    boto.update_function_configuration(FunctionName="life", Timeout=30, MemorySize=512)
    third = caller.invoke("life", {"env": ["COLOUR"]}).body
    assert third["left_ms"] <= 30_000 and third["env"] == {"COLOUR": "red"}

    boto.delete_function(FunctionName="life")
    status, code, message = caller.rejected("invoke", FunctionName="life")
    assert (status, code) == (404, "ResourceNotFoundException")
    assert message.startswith("Function not found: arn:aws:lambda:")


def test_list_functions_pagination(caller: Caller) -> None:
    names = [f"page-{number}" for number in range(5)]
    for name in names:
        caller.create(name)
    pages = list(
        caller.boto.get_paginator("list_functions").paginate(PaginationConfig={"PageSize": 2})
    )
    assert len(pages) >= 3
    listed = [function["FunctionName"] for page in pages for function in page["Functions"]]
    assert set(names) <= set(listed) and len(listed) == len(set(listed))


def test_versions_and_aliases(caller: Caller) -> None:
    """Versions are immutable; aliases can be moved."""
    boto = caller.boto
    caller.create("versioned", ANOTHER.replace("another", "one"))
    one = boto.publish_version(FunctionName="versioned")
    assert one["Version"] == "1" and one["FunctionArn"].endswith(":versioned:1")
    assert boto.publish_version(FunctionName="versioned")["Version"] == "1", "nothing has changed"
    alias = boto.create_alias(FunctionName="versioned", Name="live", FunctionVersion="1")
    assert alias["AliasArn"].endswith(":versioned:live")

    code = zipped({"module.py": ANOTHER.replace("another", "two")})
    boto.update_function_code(FunctionName="versioned", ZipFile=code, Publish=True)
    assert caller.invoke("versioned").body == "two"
    called = caller.invoke("versioned", Qualifier="live")
    assert (called.body, called.response["ExecutedVersion"]) == ("one", "1")
    boto.update_alias(FunctionName="versioned", Name="live", FunctionVersion="2")
    assert caller.invoke(alias["AliasArn"]).body == "two"
    assert caller.invoke("versioned:1").body == "one"

    versions = boto.list_versions_by_function(FunctionName="versioned")["Versions"]
    assert [version["Version"] for version in versions] == ["$LATEST", "1", "2"]
    rejected = caller.rejected("delete_function", FunctionName="versioned", Qualifier="2")
    assert rejected[:2] == (409, "ResourceConflictException")
    boto.delete_alias(FunctionName="versioned", Name="live")
    boto.delete_function(FunctionName="versioned", Qualifier="2")
    assert caller.rejected("invoke", FunctionName="versioned", Qualifier="2")[0] == 404


def test_provisioned_concurrency(platform: EmbeddedPlatform, caller: Caller) -> None:
    """Needs a version; no invocation is cold; instances that die are replaced."""
    boto = caller.boto
    caller.create("ready")
    put = {"FunctionName": "ready", "ProvisionedConcurrentExecutions": 2}
    assert caller.rejected("put_provisioned_concurrency_config", Qualifier="$LATEST", **put)[
        :2
    ] == (
        400,
        "InvalidParameterValueException",
    )
    boto.publish_version(FunctionName="ready")
    missing = caller.rejected(
        "get_provisioned_concurrency_config", FunctionName="ready", Qualifier="1"
    )
    assert missing[:2] == (404, "ProvisionedConcurrencyConfigNotFoundException")
    began_s = time.monotonic()
    request = boto.put_provisioned_concurrency_config(Qualifier="1", **put)
    assert request["RequestedProvisionedConcurrentExecutions"] == 2

    def status() -> str:
        of = {"FunctionName": "ready", "Qualifier": "1"}
        return str(boto.get_provisioned_concurrency_config(**of)["Status"])

    assert eventually(lambda: status() == "READY")
    event = {"env": ["AWS_LAMBDA_INITIALIZATION_TYPE"]}
    called = caller.invoke("ready", event, Qualifier="1").body
    assert list(called["env"].values()) == ["provisioned-concurrency"]
    caller.invoke("ready", {"exit": 1}, Qualifier="1")
    assert eventually(lambda: status() == "READY"), "the instance was not replaced"
    records = platform.billing_log.records("ready")
    assert [(each.is_provisioned, each.is_cold, each.init_ms) for each in records] == [
        (True, False, 0.0)
    ] * 2

    boto.delete_provisioned_concurrency_config(FunctionName="ready", Qualifier="1")
    took_s = time.monotonic() - began_s
    assert eventually(lambda: not [i for i in platform.instances() if i.function == "ready"])
    held_s = platform.provisioned_gb_s / (1_769 / 1024)
    assert took_s < held_s <= 2 * took_s, "two instances for nearly all of the time"
    assert platform.provisioned_gb_s / (1_769 / 1024) == held_s, "still accruing"


def test_provisioning_fails_if_instances_do_not_start(caller: Caller) -> None:
    caller.create("broken", "import nothing_of_this_name\n")
    caller.boto.publish_version(FunctionName="broken")
    of = {"FunctionName": "broken", "Qualifier": "1"}
    caller.boto.put_provisioned_concurrency_config(ProvisionedConcurrentExecutions=1, **of)
    get = caller.boto.get_provisioned_concurrency_config
    assert eventually(lambda: get(**of)["Status"] == "FAILED")


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"FunctionName": "f"}, 409, "ResourceConflictException"),
        ({"Code": {"ZipFile": b"no zip"}}, 400, "InvalidParameterValueException"),
        ({"Code": {"S3Bucket": "bucket", "S3Key": "key"}}, 400, "InvalidParameterValueException"),
        ({"MemorySize": 20_000}, 400, "InvalidParameterValueException"),
        ({"Timeout": 5_000}, 400, "InvalidParameterValueException"),
        ({"Handler": "module\0.handle"}, 400, "InvalidParameterValueException"),
        ({"Handler": "é" * 129}, 400, "InvalidParameterValueException"),
        ({"Code": {"ZipFile": zipped({"a" * 300: ""})}}, 400, "InvalidParameterValueException"),
        (
            {"Code": {"ZipFile": zipped({"a": "", "a/b": ""})}},
            400,
            "InvalidParameterValueException",
        ),
        ({"Code": {"ImageUri": "file:///\0"}}, 400, "InvalidParameterValueException"),
        (
            {"Environment": {"Variables": {"KEY=": "value"}}},
            400,
            "InvalidParameterValueException",
        ),
        (
            {"Environment": {"Variables": {"KEY": "val\0ue"}}},
            400,
            "InvalidParameterValueException",
        ),
        (
            {"Environment": {"Variables": {"AWS_REGION": "moon"}}},
            400,
            "InvalidParameterValueException",
        ),
    ],
)
def test_invalid_create_function(
    caller: Caller, options: dict[str, object], status: int, code: str
) -> None:
    request: dict[str, object] = {
        "FunctionName": "new",
        "Role": ROLE,
        "Runtime": RUNTIME,
        "Handler": "module.handle",
        "Code": {"ZipFile": zipped({"module.py": ANOTHER})},
    }
    assert caller.rejected("create_function", **(request | options))[:2] == (status, code)
    assert caller.rejected("get_function", FunctionName="new")[0] == 404


def test_register_directory(platform: EmbeddedPlatform, caller: Caller) -> None:
    """Errors: a duplicate name, and a missing directory."""
    assert caller.invoke("f", {"note": "hello"}).body["note"] == "hello"
    with pytest.raises(ConfigError, match="already exist"):
        platform.register("f", platform.directory, "module.handle")
    with pytest.raises(ConfigError, match="not a directory"):
        platform.register("g", platform.directory / "nowhere", "module.handle")


def test_relative_platform_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances have another working directory: the path must be resolved before."""
    monkeypatch.chdir(tmp_path)
    with EmbeddedPlatform("data") as platform:
        caller = Caller(platform.client_options)
        caller.create("near")
        assert caller.invoke("near", {"note": 1}).body["note"] == 1
        caller.boto.close()
