"""Loggers that speak on rank 0 only: what all ranks would say is said once. Errors are said by whoever has them."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist


class FirstRankOnly(logging.Filter):
    """Lets pass what rank 0 says, and every ERROR. Remove it from a logger to hear all ranks."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or _rank() == 0


def first_rank_logger(name: str) -> logging.Logger:
    """The logger `name`, with the filter; as logging.getLogger."""
    log = logging.getLogger(name)
    if not any(isinstance(known, FirstRankOnly) for known in log.filters):
        log.addFilter(FirstRankOnly())
    return log


def _rank() -> int:
    """By the process group, or by what torchrun has set for a group that is not there yet."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
