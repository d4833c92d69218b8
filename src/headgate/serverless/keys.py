"""The keys of a platform: made when it starts, left in a file for its user, removed at its end."""

from __future__ import annotations

import base64
import os
import secrets
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from headgate.app.endpoints import (
    FILE_VARIABLE,
    KEY_PREFIX,
    KeysFile,
    PlatformKeys,
    fixed_keys,
    keys_for,
    keys_path,
)
from headgate.core.errors import ConfigError
from headgate.serverless.janitor import unfinished_keys

REGION: Final = "us-east-1"
_MODE: Final = 0o600


def make_keys() -> PlatformKeys:
    """Return the keys that variables fix, or else new ones. Raises `ConfigError`."""
    fixed = fixed_keys()
    if fixed is not None:
        return fixed
    id = KEY_PREFIX + base64.b32encode(secrets.token_bytes(10)).decode()
    return PlatformKeys(id, secrets.token_urlsafe(30))


def client_options(endpoint_url: str, region: str = REGION) -> dict[str, str]:
    """Return what `boto3.client` needs for the platform at an address of this machine."""
    keys = keys_for(endpoint_url)
    return {
        "endpoint_url": endpoint_url,
        "region_name": region,
        "aws_access_key_id": keys.access_key_id,
        "aws_secret_access_key": keys.secret_access_key,
    }


@dataclass(frozen=True, slots=True)
class KeysPlace:
    """Where a platform leaves its keys, and under which name it does so."""

    path: Path
    platform: str

    @classmethod
    def choose(cls, path: Path | None, port: int) -> KeysPlace:
        """Take the path that was asked for, or the usual one of a port."""
        named = os.environ.get(FILE_VARIABLE)
        chosen = path or (Path(named) if named else keys_path(port))
        return cls(chosen.absolute(), str(uuid.uuid4()))

    @property
    def words(self) -> str:
        """Where keys are, for whoever came without: not whose home it is."""
        shown = str(self.path)
        home = os.path.expanduser("~") + os.sep  # noqa: PTH111  # which may not be known
        if shown.startswith(home):
            shown = f"~/{shown.removeprefix(home)}"
        return f"in {shown}, for the user who started it"

    def write(self, keys: PlatformKeys, endpoint_url: str, region: str) -> None:
        """Write the keys where nobody but this user can read them. Raises `ConfigError`."""
        written = KeysFile(
            self.platform, endpoint_url, region, keys.access_key_id, keys.secret_access_key
        )
        # Under another name first: nobody finds half of it, and a link in the way is not followed.
        unfinished = unfinished_keys(self.path, self.platform)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, _MODE)  # whatever the umask
                file.write(msgspec.json.format(msgspec.json.encode(written)) + b"\n")
            unfinished.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise ConfigError(
                f"the keys cannot be written: {error.strerror}",
                where=str(self.path),
                allowed="--keys-file PATH",
            ) from None
