"""Exceptions as one line of text."""

from __future__ import annotations

from typing import Final

CHARS_MAX: Final = 1000


def error_text(error: BaseException) -> str:
    """Return type and message of an exception in one line, even if its `__str__` raises.

    >>> error_text(ValueError("no\\nway"))
    'ValueError: no way'
    """
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = type(error).__name__
    return sendable(" ".join(text[:CHARS_MAX].split()))


def sendable(text: str) -> str:
    """Return text that can be encoded as UTF-8: lone surrogates are replaced.

    >>> sendable("a\\udcff")
    'a?'
    """
    if type(text) is str and text.isascii():
        return text
    return str.encode(text, "utf-8", "replace").decode()  # works for subclasses of `str` as well
