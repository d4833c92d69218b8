"""Every parameter that boto3 can send does what it says, or is refused by name."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from platform_rig import ROLE, Caller, zipped

from headgate.lambda_emulator import EmbeddedPlatform
from headgate.lambda_emulator.api_models import ARCHITECTURE, RUNTIME

MODULE = "def handle(event, context):\n    return 1\n"
OTHER_ARCHITECTURE = "x86_64" if ARCHITECTURE == "arm64" else "arm64"
# What is there, or is said again and has no effect by itself (Role).
SUPPORTED = {
    "create_function": (
        "FunctionName", "Runtime", "Role", "Handler", "Code", "Description", "Timeout",
        "MemorySize", "Publish", "PackageType", "Environment", "Tags", "Architectures",
    ),
    "update_function_configuration": (
        "FunctionName", "Role", "Handler", "Description", "Timeout", "MemorySize", "Environment",
        "Runtime", "RevisionId",
    ),
    "update_function_code": (
        "FunctionName", "ZipFile", "ImageUri", "Architectures", "Publish", "DryRun", "RevisionId",
    ),
    "publish_version": ("FunctionName", "CodeSha256", "Description", "RevisionId"),
    "create_alias": ("FunctionName", "Name", "FunctionVersion", "Description"),
    "update_alias": ("FunctionName", "Name", "FunctionVersion", "Description", "RevisionId"),
    "invoke": (
        "FunctionName", "InvocationType", "LogType", "ClientContext", "Payload", "Qualifier",
    ),
    "put_function_concurrency": ("FunctionName", "ReservedConcurrentExecutions"),
    "put_provisioned_concurrency_config": (
        "FunctionName", "Qualifier", "ProvisionedConcurrentExecutions",
    ),
    "list_functions": ("Marker", "MaxItems"),
    "list_aliases": ("FunctionName", "Marker", "MaxItems"),
    "list_versions_by_function": ("FunctionName", "Marker", "MaxItems"),
}  # fmt: skip
NEEDED: dict[str, dict[str, object]] = {
    "create_function": {
        "FunctionName": "new",
        "Runtime": RUNTIME,
        "Role": ROLE,
        "Handler": "module.handle",
        "Code": {"ZipFile": zipped({"module.py": MODULE})},
    },
    "update_function_configuration": {"FunctionName": "g"},
    "update_function_code": {"FunctionName": "g", "ZipFile": zipped({"module.py": MODULE})},
    "publish_version": {"FunctionName": "g"},
    "create_alias": {"FunctionName": "g", "Name": "new", "FunctionVersion": "$LATEST"},
    "update_alias": {"FunctionName": "g", "Name": "live"},
    "invoke": {"FunctionName": "g"},
    "put_function_concurrency": {"FunctionName": "g"},
    "put_provisioned_concurrency_config": {"FunctionName": "g"},
    "list_functions": {},
    "list_aliases": {"FunctionName": "g"},
    "list_versions_by_function": {"FunctionName": "g"},
}


def _cases() -> list[tuple[str, str, object]]:
    """Every parameter of these operations that is not supported, with a value that means much."""
    model = boto3.client(
        "lambda", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    ).meta
    cases = []
    for operation, supported in SUPPORTED.items():
        name = model.method_to_api_mapping[operation]
        shape = model.service_model.operation_model(name).input_shape
        cases += [
            (operation, parameter, _something(member))
            for parameter, member in shape.members.items()
            if parameter not in supported
        ]
        code = shape.members.get("Code")
        for parameter, member in code.members.items() if code is not None else ():
            if parameter not in ("ZipFile", "ImageUri"):
                cases.append((operation, f"Code.{parameter}", _something(member)))
    return cases


def _something(shape: Any) -> object:
    """A value of a shape of botocore's."""
    if shape.type_name == "structure":
        return {name: _something(member) for name, member in shape.members.items()}
    if shape.type_name == "list":
        return [_something(shape.member)]
    if shape.type_name == "map":
        return {"1": _something(shape.value)}
    plain = {"integer": 1_024, "boolean": True, "double": 2.5, "float": 2.5, "blob": b"x"}
    return plain.get(shape.type_name, (getattr(shape, "enum", None) or ["something"])[0])


@pytest.fixture(scope="module", autouse=True)
def _function(served: tuple[EmbeddedPlatform, Caller]) -> None:
    caller = served[1]
    caller.create("g", MODULE)
    caller.boto.create_alias(FunctionName="g", Name="live", FunctionVersion="$LATEST")


@pytest.mark.parametrize(("operation", "parameter", "value"), _cases())
def test_what_is_not_there_is_refused_by_name(
    caller: Caller, operation: str, parameter: str, value: object
) -> None:
    asked = dict(NEEDED[operation])
    outer, _, inner = parameter.rpartition(".")
    if outer:
        asked[outer] = {**asked[outer], inner: value}  # type: ignore[dict-item]  # a dict, too
    else:
        asked[parameter] = value
    status, code, said = caller.refused(operation, **asked)
    assert (status, code) == (400, "InvalidParameterValueException")
    assert inner in said, said
    assert caller.refused("get_function", FunctionName="new")[0] == 404


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("Runtime", "nodejs20.x"),
        ("Runtime", "python2.7"),
        ("Architectures", [OTHER_ARCHITECTURE]),
        ("PackageType", "Image"),
        ("Tags", {"aws:cloudformation": "x"}),
        ("Tags", {str(n): "x" for n in range(51)}),
    ],
)
def test_values_that_are_not_there(caller: Caller, parameter: str, value: object) -> None:
    asked = {**NEEDED["create_function"], parameter: value}
    status, code, said = caller.refused("create_function", **asked)
    assert (status, code) == (400, "InvalidParameterValueException")
    assert said.startswith(f"{parameter}: "), said


def test_values_that_ask_for_nothing_are_taken(caller: Caller) -> None:
    """As tools write them out, which know the defaults."""
    nothing: dict[str, object] = {
        "VpcConfig": {"SubnetIds": [], "SecurityGroupIds": []},
        "DeadLetterConfig": {"TargetArn": ""},
        "KMSKeyArn": "",
        "TracingConfig": {"Mode": "PassThrough"},
        "Layers": [],
        "FileSystemConfigs": [],
        "ImageConfig": {},
        "EphemeralStorage": {"Size": 512},
        "SnapStart": {"ApplyOn": "None"},
        "LoggingConfig": {"LogFormat": "Text"},
    }
    architectures = {"Architectures": [ARCHITECTURE]}
    made = caller.boto.create_function(
        **{**NEEDED["create_function"], "FunctionName": "plain", **nothing, **architectures}
    )
    assert made["Architectures"] == [ARCHITECTURE] and made["Runtime"] == RUNTIME
    caller.boto.update_function_configuration(FunctionName="plain", **nothing)
    caller.boto.publish_version(FunctionName="plain")
    routing: dict[str, dict[str, float]] = {"AdditionalVersionWeights": {}}
    caller.boto.create_alias(
        FunctionName="plain", Name="live", FunctionVersion="1", RoutingConfig=routing
    )
    assert caller.invoke("plain:live", {}).body == 1
    caller.boto.delete_function(FunctionName="plain")


def test_tags(caller: Caller) -> None:
    """They are kept, changed and shown, and belong to a function and not to its versions."""
    boto = caller.boto
    made = caller.create("tagged", MODULE, Tags={"team": "shop", "a b": "c/d"}, Publish=True)
    whole = made["FunctionArn"].rpartition(":")[0]
    assert boto.get_function(FunctionName="tagged")["Tags"] == {"team": "shop", "a b": "c/d"}
    boto.tag_resource(Resource=whole, Tags={"team": "search", "stage": "test"})
    expected = {"team": "search", "a b": "c/d", "stage": "test"}
    assert boto.list_tags(Resource=whole)["Tags"] == expected
    boto.untag_resource(Resource=whole, TagKeys=["a b", "stage", "none"])
    assert boto.list_tags(Resource=whole)["Tags"] == {"team": "search"}
    boto.update_function_configuration(FunctionName="tagged", Timeout=9)
    assert boto.get_function(FunctionName="tagged")["Tags"] == {"team": "search"}
    refused = caller.refused("tag_resource", Resource=made["FunctionArn"], Tags={"a": "b"})
    assert refused[:2] == (400, "InvalidParameterValueException") and "Qualifier" in refused[2]
    many = {str(n): "x" for n in range(50)}
    assert caller.refused("tag_resource", Resource=whole, Tags=many)[0] == 400
    assert boto.list_tags(Resource=whole)["Tags"] == {"team": "search"}
    assert caller.refused("list_tags", Resource=f"{whole}-none")[0] == 404
    assert "Tags" not in boto.get_function(FunctionName="g")


def test_what_is_done_to_a_function_is_not_done_to_its_version(caller: Caller) -> None:
    caller.create("two", MODULE, Publish=True)
    for operation, more in (
        ("update_function_code", {"ZipFile": zipped({"module.py": MODULE + "\n"})}),
        ("update_function_configuration", {"Timeout": 9}),
        ("publish_version", {}),
        ("put_function_concurrency", {"ReservedConcurrentExecutions": 1}),
    ):
        refused = caller.refused(operation, FunctionName="two:1", **more)
        assert refused[:2] == (400, "InvalidParameterValueException"), operation
        assert "Qualifier" in refused[2]


def test_a_change_to_what_has_changed_since(caller: Caller) -> None:
    """`RevisionId` is what the client has seen last."""
    boto = caller.boto
    seen = caller.create("seen", MODULE)["RevisionId"]
    now = boto.update_function_configuration(FunctionName="seen", Timeout=9, RevisionId=seen)
    assert now["RevisionId"] != seen
    code = {"ZipFile": zipped({"module.py": MODULE})}
    for operation, more in (
        ("update_function_configuration", {"Timeout": 8}),
        ("update_function_code", code),
        ("publish_version", {}),
    ):
        refused = caller.refused(operation, FunctionName="seen", RevisionId=seen, **more)
        assert refused[:2] == (412, "PreconditionFailedException"), operation
    boto.publish_version(FunctionName="seen", RevisionId=now["RevisionId"])
    alias = boto.create_alias(
        FunctionName="seen", Name="live", FunctionVersion="1", Description="the best"
    )
    of = {"FunctionName": "seen", "Name": "live"}
    changed = boto.update_alias(FunctionVersion="$LATEST", RevisionId=alias["RevisionId"], **of)
    assert changed["Description"] == "the best", "what is not named stays"
    refused = caller.refused("update_alias", RevisionId=alias["RevisionId"], **of)
    assert refused[:2] == (412, "PreconditionFailedException")


def test_versions_and_aliases_come_in_pages(caller: Caller) -> None:
    boto = caller.boto
    caller.create("paged", MODULE)
    for number in range(3):
        boto.update_function_configuration(FunctionName="paged", Description=str(number))
        boto.update_function_configuration(FunctionName="paged", Timeout=number + 1)
        boto.publish_version(FunctionName="paged")
        boto.create_alias(FunctionName="paged", Name=f"a{number}", FunctionVersion="1")
    for operation, key, name, expected in (
        ("list_versions_by_function", "Versions", "Version", ["$LATEST", "1", "2", "3"]),
        ("list_aliases", "Aliases", "Name", ["a0", "a1", "a2"]),
    ):
        pages = boto.get_paginator(operation).paginate(
            FunctionName="paged", PaginationConfig={"PageSize": 2}
        )
        found = [[each[name] for each in page[key]] for page in pages]
        assert [len(page) for page in found] == [2, len(expected) - 2]
        assert [each for page in found for each in page] == expected
