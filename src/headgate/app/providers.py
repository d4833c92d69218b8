"""Who runs each pool, from the application file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from msgspec import convert

from headgate.app.endpoints import is_address
from headgate.app.entry import Entry
from headgate.app.loaded import LoadedApp
from headgate.app.pool_spec import PoolSpec

_REMOTE_ONLY: Final = ("target", "endpoint_url", "region")


@dataclass(frozen=True, slots=True)
class Provider:
    """Who runs the nodes or the functions of a pool."""

    kind: Literal["local", "lambda", "sagemaker"]
    target: str = ""  # the function or the endpoint; `target_of` fills it in
    endpoint_url: str | None = None  # None: AWS itself
    region: str | None = None  # None: as AWS's own settings have it

    def target_of(self, function: str, node: int = 1) -> str:
        """Return what is called to run a function, on the n-th node.

        >>> Provider("lambda", "shop-{function}").target_of("rank")
        'shop-rank'
        """
        return self.target.replace("{function}", function).replace("{node}", str(node))


def providers_of(loaded: LoadedApp) -> tuple[Provider | None, ...]:
    """Return who runs each pool, by its id; None: nobody, it can only be simulated."""
    pools = convert(loaded.spec["pools"], dict[str, PoolSpec])
    if not pools:
        return (Provider("local"),)  # the one that there is where none is declared
    return tuple(
        choose_provider(Entry(spec, "the application", f"pools.{name}"))
        for name, spec in pools.items()
    )


def choose_provider(entry: Entry[PoolSpec]) -> Provider | None:
    """Return who runs a pool; None: nobody. Raises `ConfigError`."""
    spec = entry.spec
    is_serverless = spec.tier == "serverless"
    kind = spec.provider or (None if is_serverless else "local")
    if spec.provider is not None and is_serverless != (spec.provider == "lambda"):
        allowed = "lambda" if is_serverless else "local, sagemaker"
        raise entry.error("provider", f"runs no {spec.tier} pools", allowed=allowed)
    if kind is None or kind == "local":
        for name in _REMOTE_ONLY:
            if getattr(spec, name) is not None:
                allowed = "only with provider: lambda or sagemaker"
                raise entry.error(name, "says where something is that runs here", allowed=allowed)
        return None if kind is None else Provider("local")
    if not spec.target:
        raise entry.error("target", "is missing", allowed=_TARGETS[kind])
    if kind == "sagemaker" and spec.nodes > 1 and "{node}" not in spec.target:
        problem = f"is one endpoint for {spec.nodes} nodes"
        raise entry.error("target", problem, allowed="a name with {node} in it")
    if spec.endpoint_url is not None:
        _check_url(entry, spec.endpoint_url)
    return Provider(kind, spec.target, spec.endpoint_url, spec.region)


def _check_url(entry: Entry[PoolSpec], url: str) -> None:
    if not is_address(url):
        allowed = "http://127.0.0.1:9001, https://...; without a user name"
        raise entry.error("endpoint_url", "is no address", allowed=allowed)


_TARGETS: Final = {
    "lambda": "the name of a Lambda function, or name:alias",
    "sagemaker": "the name of a SageMaker endpoint",
}
