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
from headgate.lambda_emulator.errors import ServiceError
from headgate.lambda_emulator.http import EmulatorRequest

KEYS = PlatformKeys("HEADGATEEXAMPLE", "a-secret-of-forty-characters/+0123456789")
URL = "http://127.0.0.1:9001"
# What may stand in a header, and arrives as it was sent.
WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
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
    """A request as it arrives, which botocore has signed."""
    named = {"Host": "127.0.0.1:9001", **(headers or {})}
    asked = AWSRequest(method, f"{URL}{path}{'?' + query if query else ''}", named, body)
    credentials = Credentials(keys.access_key_id, keys.secret_access_key)
    SigV4Auth(credentials, service, "eu-central-1").add_auth(asked)
    return received(asked, body)


def received(asked: AWSRequest, body: bytes) -> EmulatorRequest:
    parts = urlsplit(asked.url)
    headers = {name.lower(): value for name, value in asked.headers.items()}
    return EmulatorRequest(
        asked.method, parts.path, parts.query, headers, local=("127.0.0.1", 9001), body=body
    )


def problem(request: EmulatorRequest, now_s: float | None = None) -> str:
    """The code of the refusal; empty if there is none."""
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
    headers=st.dictionaries(NAMES, WORDS, max_size=4),
    body=st.binary(max_size=300),
)
def test_what_botocore_signs_is_taken(
    method: str,
    segments: list[str],
    query: list[tuple[str, str]],
    headers: dict[str, str],
    body: bytes,
) -> None:
    """Any method, path, query, header and body; and one bit more in the body is another request."""
    path = "/" + "/".join(quote(each, safe="") for each in segments)
    written = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in query)
    unlike = {name.lower(): name for name in headers}  # botocore would join what we would not send
    request = signed(method, path, written, body, {n: headers[n] for n in unlike.values()})
    assert problem(request) == ""
    assert problem(replace(request, body=body + b"\0")) == "InvalidSignatureException"


def test_a_header_with_spaces_inside() -> None:
    assert problem(signed(headers={"X-Note": "  a   b  "})) == ""


def changed(request: EmulatorRequest, **headers: str) -> EmulatorRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return replace(request, headers={**request.headers, **named})


def test_what_was_changed_is_refused() -> None:
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


def test_what_is_not_signed_but_should_be() -> None:
    """A header of AWS's that somebody has added on the way; the date; the host."""
    assert problem(changed(signed(), x_amz_tenant_id="x")) == "IncompleteSignatureException"
    for name in ("host", "x-amz-date"):
        request = signed()
        said = request.headers["authorization"]
        for listed in (f"{name};", f";{name}"):
            said = said.replace(listed, "")
        assert problem(changed(request, authorization=said)) == "IncompleteSignatureException"


def test_the_digest_of_the_body_that_a_client_declares_must_be_right() -> None:
    for declared in ("UNSIGNED-PAYLOAD", hashlib.sha256(b"other").hexdigest()):
        request = signed(headers={"X-Amz-Content-SHA256": declared})
        assert problem(request) == "InvalidSignatureException"
    right = hashlib.sha256(b"{}").hexdigest()
    assert problem(signed(headers={"X-Amz-Content-SHA256": right})) == ""


def test_clocks_may_differ_by_five_minutes() -> None:
    request = signed()
    then = datetime.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    for skew_s in (SKEW_S_MAX, -SKEW_S_MAX):
        assert problem(request, then.timestamp() + skew_s) == ""
        beyond_s = then.timestamp() + skew_s * 1.01
        assert problem(request, beyond_s) == "InvalidSignatureException"
    assert problem(changed(request, x_amz_date="now")) == "IncompleteSignatureException"
    yesterday = f"20000101{request.headers['x-amz-date'][8:]}"
    assert problem(changed(request, x_amz_date=yesterday)) == "InvalidSignatureException"


def test_a_signature_for_another_service() -> None:
    assert problem(signed(service="s3")) == "IncompleteSignatureException"


@pytest.mark.parametrize(
    "said",
    [
        "",
        "any",
        "AWS4-HMAC-SHA256 any",
        "AWS4-HMAC-SHA256 Credential=a, SignedHeaders=host, Signature=" + "0" * 64,
        "Basic dXNlcjpwYXNzd29yZA==",
        "AWS4-HMAC-SHA256 " + "Credential=a/b/c/lambda/aws4_request, " * 3,
    ],
)
def test_headers_that_are_no_signature(said: str) -> None:
    assert problem(changed(signed(), authorization=said)) == "IncompleteSignatureException"


def test_a_signature_in_the_address_is_no_signature() -> None:
    """Neither a made-up one nor the one that botocore makes with the right keys."""
    plain = EmulatorRequest("GET", "/2015-03-31/functions", "X-Amz-Signature=x", {})
    assert problem(plain) == "MissingAuthenticationTokenException"
    asked = AWSRequest("GET", f"{URL}/2015-03-31/functions", headers={"Host": "127.0.0.1:9001"})
    credentials = Credentials(KEYS.access_key_id, KEYS.secret_access_key)
    SigV4QueryAuth(credentials, "lambda", "eu-central-1").add_auth(asked)
    assert "X-Amz-Signature=" in asked.url
    assert problem(received(asked, b"")) == "MissingAuthenticationTokenException"


def test_who_has_other_keys_is_told_where_these_are() -> None:
    access = RequestAuth(KEYS, "127.0.0.1")
    access.keys_are = "in ~/keys.json"
    stranger = signed(keys=PlatformKeys("headgate", "headgate"))
    refusal = access.screen(stranger)
    assert refusal is not None and refusal.status == 403
    assert refusal.headers["x-amzn-ErrorType"] == "UnrecognizedClientException"
    assert b"~/keys.json" in refusal.body
    assert KEYS.secret_access_key.encode() not in refusal.body
    with pytest.raises(ServiceError, match="UnrecognizedClient"):
        access.check(stranger)
