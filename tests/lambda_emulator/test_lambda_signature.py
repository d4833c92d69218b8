"""Signatures of AWS, version 4: what botocore signs is taken, and nothing that was changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from headgate.config.providers import PlatformKeys
from headgate.lambda_emulator.auth import SKEW_S_MAX, RequestAuth, check_signature, read_signature
from headgate.lambda_emulator.http import EmulatorRequest, ServiceError

KEYS = PlatformKeys("HEADGATEEXAMPLE", "a-secret-of-forty-characters/+0123456789")
URL = "http://127.0.0.1:9001"
# Header values that arrive unchanged.
HEADER_VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
SEGMENTS = st.text(min_size=1, max_size=12).filter(lambda text: text not in (".", ".."))
NAMES = st.from_regex(r"[Xx]-[a-zA-Z]{1,12}", fullmatch=True)


def signed(
    method: str = "POST",
    path: str = "/2015-03-31/functions",
    query: str = "",
    body: bytes = b"{}",
    headers: Mapping[str, str] | None = None,
    keys: PlatformKeys = KEYS,
    service: str = "lambda",
) -> EmulatorRequest:
    """Return a request as it arrives, signed by botocore."""
    named = {"Host": "127.0.0.1:9001", **(headers or {})}
    request = AWSRequest(method, f"{URL}{path}{'?' + query if query else ''}", named, body)
    credentials = Credentials(keys.access_key_id, keys.secret_access_key)
    SigV4Auth(credentials, service, "eu-central-1").add_auth(request)
    return received(request, body)


def received(request: AWSRequest, body: bytes) -> EmulatorRequest:
    parts = urlsplit(request.url)
    headers = {name.lower(): value for name, value in request.headers.items()}
    return EmulatorRequest(
        request.method, parts.path, parts.query, headers, local=("127.0.0.1", 9001), body=body
    )


def problem(request: EmulatorRequest, now_s: float | None = None) -> str:
    """Return the error code; empty if the signature is valid."""
    now_s = datetime.now(UTC).timestamp() if now_s is None else now_s
    try:
        check_signature(read_signature(request, now_s), request, KEYS.secret_access_key)
    except ServiceError as error:
        assert error.status == 403
        return error.code
    return ""


@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    segments=st.lists(SEGMENTS, max_size=4),
    query=st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), max_size=4),
    headers=st.dictionaries(NAMES, HEADER_VALUES, max_size=4),
    body=st.binary(max_size=300),
)
def test_botocore_signatures_are_accepted(
    method: str,
    segments: list[str],
    query: list[tuple[str, str]],
    headers: dict[str, str],
    body: bytes,
) -> None:
    """For any method, path, query, headers and body; one more byte of body is rejected."""
    path = "/" + "/".join(quote(each, safe="") for each in segments)
    written = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in query)
    # Names that differ in case only are one header: botocore would join them.
    unlike = {name.lower(): name for name in headers}
    request = signed(method, path, written, body, {n: headers[n] for n in unlike.values()})
    assert problem(request) == ""
    assert problem(replace(request, body=body + b"\0")) == "InvalidSignatureException"


def test_header_with_inner_spaces() -> None:
    assert problem(signed(headers={"X-Note": "  a   b  "})) == ""


def changed(request: EmulatorRequest, **headers: str) -> EmulatorRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return replace(request, headers={**request.headers, **named})


def test_tampered_requests_are_rejected() -> None:
    request = signed(query="Qualifier=1", headers={"X-Amz-Invocation-Type": "DryRun"})
    assert problem(request) == ""
    wrong = "InvalidSignatureException"
    assert problem(replace(request, method="PUT")) == wrong
    assert problem(replace(request, path="/2015-03-31/functions/f")) == wrong
    assert problem(replace(request, query_string="Qualifier=2")) == wrong
    assert problem(replace(request, query_string="Qualifier=1&List=ALL")) == wrong
    assert problem(replace(request, query_string="")) == wrong
    assert problem(replace(request, body=b"")) == wrong
    assert problem(changed(request, x_amz_invocation_type="Event")) == wrong
    assert problem(changed(request, host="localhost")) == wrong
    other = PlatformKeys(KEYS.access_key_id, "another-secret")
    assert problem(signed(keys=other)) == wrong


def test_unsigned_required_headers() -> None:
    """An `X-Amz-` header added in transit; the date; the host."""
    assert problem(changed(signed(), x_amz_tenant_id="x")) == "IncompleteSignatureException"
    for name in ("host", "x-amz-date"):
        request = signed()
        message = request.headers["authorization"]
        for listed in (f"{name};", f";{name}"):
            message = message.replace(listed, "")
        assert problem(changed(request, authorization=message)) == "IncompleteSignatureException"


def test_declared_body_digest_must_match() -> None:
    for declared in ("UNSIGNED-PAYLOAD", hashlib.sha256(b"other").hexdigest()):
        request = signed(headers={"X-Amz-Content-SHA256": declared})
        assert problem(request) == "InvalidSignatureException"
    right = hashlib.sha256(b"{}").hexdigest()
    assert problem(signed(headers={"X-Amz-Content-SHA256": right})) == ""


def test_clock_skew_limit() -> None:
    request = signed()
    then = datetime.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    for skew_s in (SKEW_S_MAX, -SKEW_S_MAX):
        assert problem(request, then.timestamp() + skew_s) == ""
        beyond_s = then.timestamp() + skew_s * 1.01
        assert problem(request, beyond_s) == "InvalidSignatureException"
    assert problem(changed(request, x_amz_date="now")) == "IncompleteSignatureException"
    yesterday = f"20000101{request.headers['x-amz-date'][8:]}"
    assert problem(changed(request, x_amz_date=yesterday)) == "InvalidSignatureException"


def test_signature_for_another_service() -> None:
    assert problem(signed(service="s3")) == "IncompleteSignatureException"


@pytest.mark.parametrize(
    "message",
    [
        "",
        "any",
        "AWS4-HMAC-SHA256 any",
        "AWS4-HMAC-SHA256 Credential=a, SignedHeaders=host, Signature=" + "0" * 64,
        "Basic dXNlcjpwYXNzd29yZA==",
        "AWS4-HMAC-SHA256 " + "Credential=a/b/c/lambda/aws4_request, " * 3,
    ],
)
def test_malformed_authorization_header(message: str) -> None:
    assert problem(changed(signed(), authorization=message)) == "IncompleteSignatureException"


def test_signature_in_query_string_is_ignored() -> None:
    """Whether forged, or made by botocore with the right keys."""
    plain = EmulatorRequest("GET", "/2015-03-31/functions", "X-Amz-Signature=x", {})
    assert problem(plain) == "MissingAuthenticationTokenException"
    request = AWSRequest("GET", f"{URL}/2015-03-31/functions", headers={"Host": "127.0.0.1:9001"})
    credentials = Credentials(KEYS.access_key_id, KEYS.secret_access_key)
    SigV4QueryAuth(credentials, "lambda", "eu-central-1").add_auth(request)
    assert "X-Amz-Signature=" in request.url
    assert problem(received(request, b"")) == "MissingAuthenticationTokenException"


def test_unknown_key_error_names_the_keys_file() -> None:
    auth = RequestAuth(KEYS, "127.0.0.1")
    auth.keys_location = "in ~/keys.json"
    unknown_client = signed(keys=PlatformKeys("headgate", "headgate"))
    with pytest.raises(ServiceError) as caught:
        auth.check_head(unknown_client)
    rejection = caught.value.response()
    assert rejection.status == 403
    assert rejection.headers["x-amzn-ErrorType"] == "UnrecognizedClientException"
    assert b"~/keys.json" in rejection.body
    assert KEYS.secret_access_key.encode() not in rejection.body
    with pytest.raises(ServiceError, match="UnrecognizedClient"):
        auth.check(unknown_client)
