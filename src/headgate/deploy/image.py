"""A directory that a container image is built from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from shlex import quote
from typing import Final

from headgate import __version__
from headgate.deploy.package import Package

_DOCKERFILE: Final = """\
# Build with: docker build -t {name} .
FROM python:{python}-slim
RUN pip install --no-cache-dir {installed}
COPY . /var/task
WORKDIR /var/task
ENV LAMBDA_TASK_ROOT=/var/task
{variables}
ENTRYPOINT ["python", "-m", "awslambdaric"]
CMD ["{handler}"]
"""


def write_dockerfile(
    package: Package, name: str, handler: str, environment: Mapping[str, str], *, is_bundled: bool
) -> None:
    """Make a package's directory one that Docker can build an image for Lambda from."""
    text = _DOCKERFILE.format(
        name=name,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        installed="awslambdaric" + ("" if is_bundled else f" headgate[onnx]=={__version__}"),
        variables="\n".join(f"ENV {key}={quote(value)}" for key, value in environment.items()),
        handler=handler,
    )
    (package.directory / "Dockerfile").write_text(text, encoding="utf-8")
