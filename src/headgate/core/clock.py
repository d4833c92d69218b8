"""Time is an integer number of nanoseconds, and always an argument.

No code below the drivers reads a clock, so every decision can be reproduced to the bit.
"""

from __future__ import annotations

from typing import Final

MICROSECOND_NS: Final = 1_000
MILLISECOND_NS: Final = 1_000_000
SECOND_NS: Final = 1_000_000_000
MINUTE_NS: Final = 60_000_000_000
HOUR_NS: Final = 3_600_000_000_000

# No deadline, no limit, not yet started. Every real instant is smaller (this is 146 years), and it
# is the largest integer that a compiled build still keeps in a register.
NEVER_NS: Final = 2**62 - 1
