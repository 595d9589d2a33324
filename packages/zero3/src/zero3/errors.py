"""What zero3 raises. Each message names the object, what was found and what to change."""

from __future__ import annotations


class Zero3Error(RuntimeError):
    """Base class of zero3's own errors."""


class UnsupportedError(Zero3Error):
    """Something that would give wrong numbers if it went on."""


class StateError(Zero3Error):
    """A unit was asked to make a move that its state does not allow."""


class RankMismatchError(Zero3Error):
    """Ranks did different things, or one of them did not come."""


class StaleViewError(Zero3Error):
    """A weight that backward needs was changed after forward had saved it."""
