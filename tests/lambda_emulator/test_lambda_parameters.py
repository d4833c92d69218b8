"""Every parameter that boto3 can send is supported, or is rejected by name."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from platform_rig import ROLE, Caller, zipped

from headgate.lambda_emulator import EmbeddedPlatform
from headgate.lambda_emulator.functions import ARCHITECTURE, RUNTIME

MODULE = "def handle(event, context):\n    return 1\n"
OTHER_ARCHITECTURE = "x86_64" if ARCHITECTURE == "arm64" else "arm64"
# Supported parameters; `Role` is stored and returned only.
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
    """Return every unsupported parameter of these operations, with a non-default value."""
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
    """Return a value of a botocore shape."""
    if shape.type_name == "structure":
        return {name: _something(member) for name, member in shape.members.items()}
    if shape.type_name == "list":
        return [_something(shape.member)]
    if shape.type_name == "map":
        return {"1": _something(shape.value)}
    if shape.type_name == "string":
        return (shape.enum or ["something".ljust(shape.metadata.get("min", 0), "x")])[0]
    return {"integer": 1_024, "boolean": True, "double": 2.5, "float": 2.5, "blob": b"x"}[
        shape.type_name
    ]


@pytest.fixture(scope="module", autouse=True)
def _function(served: tuple[EmbeddedPlatform, Caller]) -> None:
    caller = served[1]
    caller.create("g", MODULE)
    caller.boto.create_alias(FunctionName="g", Name="live", FunctionVersion="$LATEST")


@pytest.mark.parametrize(("operation", "parameter", "value"), _cases())
def test_unsupported_parameters_are_rejected_by_name(
    caller: Caller, operation: str, parameter: str, value: object
) -> None:
    request = dict(NEEDED[operation])
    outer, _, inner = parameter.rpartition(".")
    if outer:
        request[outer] = {**request[outer], inner: value}  # type: ignore[dict-item]  # a dict, too
    else:
        request[parameter] = value
    status, code, message = caller.rejected(operation, **request)
    assert (status, code) == (400, "InvalidParameterValueException")
    assert inner in message, message
    assert caller.rejected("get_function", FunctionName="new")[0] == 404


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
def test_unsupported_values(caller: Caller, parameter: str, value: object) -> None:
    request = {**NEEDED["create_function"], parameter: value}
    status, code, message = caller.rejected("create_function", **request)
    assert (status, code) == (400, "InvalidParameterValueException")
    assert message.startswith(f"{parameter}: "), message


def test_default_values_of_unsupported_parameters_are_accepted(caller: Caller) -> None:
    """Tools send such defaults explicitly."""
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
    created = caller.boto.create_function(
        **{**NEEDED["create_function"], "FunctionName": "plain", **nothing, **architectures}
    )
    assert created["Architectures"] == [ARCHITECTURE] and created["Runtime"] == RUNTIME
    caller.boto.update_function_configuration(FunctionName="plain", **nothing)
    caller.boto.publish_version(FunctionName="plain")
    routing: dict[str, dict[str, float]] = {"AdditionalVersionWeights": {}}
    caller.boto.create_alias(
        FunctionName="plain", Name="live", FunctionVersion="1", RoutingConfig=routing
    )
    assert caller.invoke("plain:live", {}).body == 1
    caller.boto.delete_function(FunctionName="plain")


def test_tags(caller: Caller) -> None:
    """Tags are stored, changed and returned; they belong to a function, not to a version."""
    boto = caller.boto
    created = caller.create("tagged", MODULE, Tags={"team": "shop", "a b": "c/d"}, Publish=True)
    whole = created["FunctionArn"].rpartition(":")[0]
    assert boto.get_function(FunctionName="tagged")["Tags"] == {"team": "shop", "a b": "c/d"}
    boto.tag_resource(Resource=whole, Tags={"team": "search", "stage": "test"})
    expected = {"team": "search", "a b": "c/d", "stage": "test"}
    assert boto.list_tags(Resource=whole)["Tags"] == expected
    boto.untag_resource(Resource=whole, TagKeys=["a b", "stage", "none"])
    assert boto.list_tags(Resource=whole)["Tags"] == {"team": "search"}
    boto.update_function_configuration(FunctionName="tagged", Timeout=9)
    assert boto.get_function(FunctionName="tagged")["Tags"] == {"team": "search"}
    rejected = caller.rejected("tag_resource", Resource=created["FunctionArn"], Tags={"a": "b"})
    assert rejected[:2] == (400, "InvalidParameterValueException") and "Qualifier" in rejected[2]
    many = {str(n): "x" for n in range(50)}
    assert caller.rejected("tag_resource", Resource=whole, Tags=many)[0] == 400
    assert boto.list_tags(Resource=whole)["Tags"] == {"team": "search"}
    assert caller.rejected("list_tags", Resource=f"{whole}-none")[0] == 404
    assert "Tags" not in boto.get_function(FunctionName="g")


def test_what_is_done_to_a_function_is_not_done_to_its_version(caller: Caller) -> None:
    caller.create("two", MODULE, Publish=True)
    for operation, more in (
        ("update_function_code", {"ZipFile": zipped({"module.py": MODULE + "\n"})}),
        ("update_function_configuration", {"Timeout": 9}),
        ("publish_version", {}),
        ("put_function_concurrency", {"ReservedConcurrentExecutions": 1}),
    ):
        rejected = caller.rejected(operation, FunctionName="two:1", **more)
        assert rejected[:2] == (400, "InvalidParameterValueException"), operation
        assert "Qualifier" in rejected[2]


def test_a_change_to_what_has_changed_since(caller: Caller) -> None:
    """`RevisionId` is optimistic locking: an outdated one is rejected."""
    boto = caller.boto
    revision = caller.create("revised", MODULE)["RevisionId"]
    now = boto.update_function_configuration(FunctionName="revised", Timeout=9, RevisionId=revision)
    assert now["RevisionId"] != revision
    code = {"ZipFile": zipped({"module.py": MODULE})}
    for operation, more in (
        ("update_function_configuration", {"Timeout": 8}),
        ("update_function_code", code),
        ("publish_version", {}),
    ):
        rejected = caller.rejected(operation, FunctionName="revised", RevisionId=revision, **more)
        assert rejected[:2] == (412, "PreconditionFailedException"), operation
    boto.publish_version(FunctionName="revised", RevisionId=now["RevisionId"])
    alias = boto.create_alias(
        FunctionName="revised", Name="live", FunctionVersion="1", Description="the best"
    )
    of = {"FunctionName": "revised", "Name": "live"}
    changed = boto.update_alias(FunctionVersion="$LATEST", RevisionId=alias["RevisionId"], **of)
    assert changed["Description"] == "the best", "unset parameters keep their value"
    rejected = caller.rejected("update_alias", RevisionId=alias["RevisionId"], **of)
    assert rejected[:2] == (412, "PreconditionFailedException")


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
        result = [[each[name] for each in page[key]] for page in pages]
        assert [len(page) for page in result] == [2, len(expected) - 2]
        assert [each for page in result for each in page] == expected
