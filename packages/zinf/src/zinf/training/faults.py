"""What can go wrong before the first step, in words for a person."""

from __future__ import annotations


class CannotStart(Exception):
    """What was asked for cannot be done; the message says why in one line, and nothing was written."""


def describe(error: Exception) -> str:
    """One line for a person: what is wrong, and with which file."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error)
    return " ".join(text.split())
