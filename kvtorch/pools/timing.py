"""Logs how long a transfer took, for who listens at level DEBUG."""

import contextlib
import logging
import time
from collections.abc import Iterator

import torch

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def transfer_time(num_tokens: int, device: torch.device) -> Iterator[None]:
    """A block whose time and throughput are logged; waits for its own stream, and only then.

    Source: SGLang 0.4.8 ``debug_timing`` (A-MOD-4), which cannot run without a GPU.
    """
    if not logger.isEnabledFor(logging.DEBUG):
        yield
        return
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    if stream:
        stream.synchronize()
    start = time.perf_counter()
    yield
    if stream:
        stream.synchronize()
    seconds = time.perf_counter() - start
    rate = num_tokens / seconds if seconds else 0.0
    logger.debug("Transfer time: %s ms, throughput: %s tokens/s", seconds * 1000, rate)
