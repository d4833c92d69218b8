"""How urgent a request is, as clients say it and as calls have it (smaller first, 0 is usual).

RFC 9218 has urgencies from 0 to 7, usually 3. The protocol's parameter has 1 for the highest, and
0 for the usual one. Both are put on one scale, so that 1 means what `u=0` means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from headgate.live.gateway.refusal import Refused

URGENCY_USUAL: Final = 3
PRIORITY_MAX: Final = 1 << 32
_URGENCY: Final = re.compile(rb"(?:^|,)[ \t]*u=([0-7])[ \t]*(?:$|[,;])")


def priority_of(headers: Mapping[bytes, bytes], parameter: object) -> int:
    """The priority of a call. The parameter goes before the header.

    Raises `Refused` if the parameter is malformed; a malformed header counts as absent, as its RFC
    demands.

    >>> priority_of({}, 1), priority_of({b"priority": b"u=0, i"}, None), priority_of({}, 0)
    (-3, -3, 0)
    """
    if parameter is not None:
        if type(parameter) is not int or not 0 <= parameter < PRIORITY_MAX:
            raise Refused(400, f"parameters.priority must be a whole number below {PRIORITY_MAX}")
        return parameter - 1 - URGENCY_USUAL if parameter else 0
    if b"priority" in headers:
        match = _URGENCY.search(headers[b"priority"])
        if match is not None:
            return int(match[1]) - URGENCY_USUAL
    return 0
