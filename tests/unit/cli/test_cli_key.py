"""`headgate key`: a random key, and its hash, which is all that is stored."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from cli_rig import headgate

from headgate.config import from_spec
from headgate.core.errors import ConfigError


def test_a_key_has_256_random_bits_and_the_file_takes_its_hash_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = [headgate("key", "--json").json for _ in range(8)]
    secrets = [base64.urlsafe_b64decode(each["key"].removeprefix("hg_") + "=") for each in made]
    assert {len(secret) for secret in secrets} == {32}
    # A bit that is the same in all of them would be one that is not random: 2 of 256 by chance.
    numbers = [int.from_bytes(secret, "big") for secret in secrets]
    fixed = [bit for bit in range(256) if len({number >> bit & 1 for number in numbers}) == 1]
    assert len(fixed) < 40
    functions = {"f": {"exec_time": "1ms"}}
    for each in made:
        assert each["hash"] == f"sha256:{hashlib.sha256(each['key'].encode()).hexdigest()}"
        config = from_spec({"functions": functions, "clients": {"a": {"key": each["hash"]}}}, "a")
        assert config.tenants[0].key == each["hash"]
        with pytest.raises(ConfigError, match=r"clients\.a\.key"):
            from_spec({"functions": functions, "clients": {"a": {"key": each["key"]}}}, "a")
    assert list(tmp_path.iterdir()) == [], "a key is kept nowhere"


def test_key_and_hash_are_labelled() -> None:
    message = headgate("key").out.splitlines()
    assert [line.split()[0] for line in message] == ["key", "hash"]
    key, hashed = (line.split()[1] for line in message)
    assert hashed == f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
