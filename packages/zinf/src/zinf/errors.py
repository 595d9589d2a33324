"""What zinf raises. Each message names the setting or object, what was found and what to change."""

from __future__ import annotations


class ZinfError(RuntimeError):
    """Base class of zinf's own errors."""


class ConfigError(ZinfError, ValueError):
    """A setting that cannot work, found before a byte is moved."""


class AbortedStepError(ZinfError):
    """A step was interrupted after parts of the model had been updated: only a checkpoint is whole."""


class CheckpointError(ZinfError):
    """A checkpoint is damaged, incomplete, or of another model."""
