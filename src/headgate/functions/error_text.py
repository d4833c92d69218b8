"""What an exception says, for somebody who sees one line of it."""

from __future__ import annotations

from typing import Final

CHARS_MAX: Final = 1000


def error_text(error: BaseException) -> str:
    """Return what an exception says, in one line of text; even of one that cannot say it.

    >>> error_text(ValueError("no\\nway"))
    'ValueError: no way'
    """
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = type(error).__name__
    return sendable(" ".join(text[:CHARS_MAX].split()))


def sendable(text: str) -> str:
    """Return text that can be encoded: half a surrogate pair cannot.

    >>> sendable("a\\udcff")
    'a?'
    """
    if type(text) is str and text.isascii():
        return text
    return str.encode(text, "utf-8", "replace").decode()  # also of a class derived from `str`
