"""Validation of responses of platforms, before anything relies on them.

Whatever runs behind a platform may be outdated, broken or hostile: the metadata of a tensor must
agree with its bytes, and a status must be one that can be forwarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from headgate.functions.tensor import ITEM_BYTES, Tensor
from headgate.live.gateway.config import GatewayConfig
from headgate.live.gateway.errors import RequestError
from headgate.live.gateway.oip.json import element_count, holds_strings, memoryview_of

_LIMITS: Final = GatewayConfig()
_ERROR_STATUSES: Final = frozenset(status.value for status in HTTPStatus if status.value >= 400)
_NAME_MAX: Final = 80  # characters of a name in an error


def check_outputs(outputs: Sequence[Tensor]) -> None:
    """Check that the metadata of tensors agrees with their data. Raises `ValueError`."""
    for tensor in outputs:
        name, datatype, data = tensor.name[:_NAME_MAX], tensor.datatype, memoryview_of(tensor)
        if datatype not in ITEM_BYTES:
            raise ValueError(f"output {name!r} has an unknown datatype")
        try:
            count = element_count(tensor.shape, name, _LIMITS.dims_max, _LIMITS.elements_max)
        except RequestError as problem:
            raise ValueError(problem.message) from None
        is_right = len(data) == count * ITEM_BYTES[datatype]
        if datatype == "BYTES":
            is_right = holds_strings(data, count)
        if not is_right:
            raise ValueError(f"output {name!r}: {len(data)} bytes are not {count} {datatype}")


def error_status(status: object) -> int:
    """Return an HTTP error status that can be forwarded: 500 for anything that is not one.

    >>> error_status(413), error_status(200), error_status(777), error_status("400")
    (413, 500, 500, 500)
    """
    return status if isinstance(status, int) and status in _ERROR_STATUSES else 500
