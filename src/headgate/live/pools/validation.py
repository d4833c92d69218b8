"""Answers of platforms, checked before anything relies on them, as requests of clients are.

Whatever answers for a platform may be old, wrong or not ours: what it says of a tensor must agree
with the bytes of the tensor, and a status must be one that can be sent on.
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
_NAME_MAX: Final = 80  # characters of a name that are shown


def check_outputs(outputs: Sequence[Tensor]) -> None:
    """See that tensors are what they say of themselves. Raises `ValueError`."""
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
    """Return the status of an error as it may be sent on: 500 for what is no such status.

    >>> error_status(413), error_status(200), error_status(777), error_status("400")
    (413, 500, 500, 500)
    """
    return status if isinstance(status, int) and status in _ERROR_STATUSES else 500
