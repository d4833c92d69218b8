"""Configuration errors of remote pools are reported before anything is served."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.config import from_spec
from headgate.config.providers import Provider
from headgate.core.errors import ConfigError
from headgate.live.deployment import assign_cores
from headgate.live.model_registry import inspect_remote_only, remote_only, with_siblings
from headgate.live.pools.registry import check_providers

HERE = "http://127.0.0.1:1"
CLOUD: dict[str, object] = {
    "tier": "serverless",
    "memory": "1GB",
    "provider": "lambda",
    "target": "f",
    "endpoint_url": HERE,
}
CODE = """
from headgate.functions import Model


class F(Model):
    inputs = {"x": "FP32[-1]"}
"""
APP = """
functions: {f: {exec_time: 1ms}}
pools: {cloud: {tier: serverless, memory: 1GB%s}}
policy: serverless_only
"""


def app(**pools: dict[str, object]) -> dict[str, object]:
    return {"functions": {"f": {"exec_time": "1ms"}}, "pools": pools}


@pytest.mark.parametrize(
    ("pool", "problem"),
    [
        (
            {"tier": "dedicated", "provider": "lambda", "target": "f"},
            "does not run dedicated pools",
        ),
        ({**CLOUD, "provider": "sagemaker"}, "does not run serverless pools"),
        ({**CLOUD, "provider": "local"}, "does not run serverless pools"),
        ({**CLOUD, "provider": "azure"}, r"pools\.p\.provider: .*lambda"),
        ({**CLOUD, "target": ""}, r"pools\.p\.target: .*is missing"),
        ({**CLOUD, "endpoint_url": "ftp://x"}, "is not a valid URL"),
        ({**CLOUD, "endpoint_url": "http://x:port"}, "is not a valid URL"),
        ({"tier": "dedicated", "target": "f"}, r"pools\.p\.target: .*is not used by this provider"),
        ({"tier": "serverless", "memory": "1GB", "region": "r"}, r"pools\.p\.region"),
        (
            {"tier": "dedicated", "nodes": 2, "provider": "sagemaker", "target": "e"},
            "same endpoint for 2 nodes",
        ),
    ],
)
def test_invalid_provider_is_one_line(pool: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        from_spec(app(p=pool), "app.yaml")


def test_providers_of_pools() -> None:
    rented = {"tier": "dedicated", "nodes": 2, "provider": "sagemaker", "target": "e-{node}"}
    config = from_spec(app(local={"tier": "dedicated"}, cloud=CLOUD, rented=rented), "app.yaml")
    assert config.providers == (
        Provider("local"),
        Provider("lambda", "f", HERE, None),
        Provider("sagemaker", "e-{node}", None, None),
    )
    found = assign_cores(config.app, range(4), "app.yaml", config.providers)
    assert [(node.id, node.name) for node in found] == [(0, "local1")]
    default = from_spec({"functions": {"f": {"exec_time": "1ms"}}}, "a")
    assert default.providers == (Provider("local"),)
    # The event log contains the providers, so a replay has the same pools.
    assert from_spec(config.spec, "log").providers == config.providers


def test_pool_without_provider_is_only_simulated() -> None:
    config = from_spec(app(p={"tier": "serverless", "memory": "1GB"}), "app.yaml")
    assert config.providers == (None,)
    with pytest.raises(ConfigError, match=r"pools\.p\.provider: has no provider: it can be sim"):
        check_providers(config, "app.yaml")


def test_remote_only_variant_has_the_signature_of_its_sibling(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere_code.py").write_text(CODE)
    near = {"code": "elsewhere_code:F", "exec_time": "1ms", "pools": ["cloud"]}
    far = {"exec_time": "2ms", "pools": ["cloud"]}
    broken = {"code": "elsewhere_code:Nobody", "exec_time": "1ms", "pools": ["cloud"]}
    functions = {"f": {"variants": {"far": far, "near": near}}, "g": broken}
    config = from_spec({"functions": functions, "pools": {"cloud": CLOUD}}, "app.yaml")
    assert len(remote_only(config)) == 3
    found = {f.function: f for f in inspect_remote_only(config, str(tmp_path))}
    filled = with_siblings(config, found)
    assert filled["f/far"].signature == filled["f/near"].signature
    assert filled["f/far"].signature.inputs[0].name == "x"
    assert filled["g"].signature.inputs == ()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "g runs on remote pools only, and its signature cannot be read: "
    )


def serve(tmp_path: Path, more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Try to serve a FaaS pool, with no AWS settings but these."""
    (tmp_path / "app.yaml").write_text(APP % more)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    nowhere = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }
    return subprocess.run(
        [sys.executable, "-m", "headgate", "serve", "app.yaml", "--port", "0"],
        cwd=tmp_path,
        env={**kept, **nowhere, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


@pytest.mark.parametrize(
    ("more", "environment", "problem"),
    [
        ("", {}, "has no provider: it can be simulated, but not served"),
        (", provider: lambda, target: f, region: eu-central-1", {}, "there are no AWS credentials"),
        (", provider: lambda, target: f", KEYS, "there is no AWS region"),
        (", provider: lambda, target: f", {"AWS_PROFILE": "nobody"}, "invalid AWS settings"),
    ],
)
def test_unusable_provider_is_not_served(
    tmp_path: Path, more: str, environment: dict[str, str], problem: str
) -> None:
    pytest.importorskip("boto3")
    done = serve(tmp_path, more, **environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert problem in done.stderr


def test_missing_boto3_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "boto3.py").write_text("raise ImportError('No module named boto3')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    done = serve(tmp_path, ", provider: lambda, target: f", PYTHONPATH=path, **KEYS)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'headgate[aws]'" in done.stderr
