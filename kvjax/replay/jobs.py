"""What does a trace ask of a machine of this size?"""

import dataclasses
from collections.abc import Iterable

from kvjax.errors import GeometryError
from kvjax.replay.trace import BLOCK_LEN, Request


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One request, its lengths scaled.

    ``units`` names the input's cacheable prefixes, shortest first: prefix ``i`` ends after
    ``(i + 1) * unit_len`` tokens.
    """

    number: int
    arrival_ms: float
    input_len: int
    output_len: int
    units: tuple[int, ...]


def unit_len(scale: int, page_size: int) -> int:
    """Tokens of the smallest prefix that is cached: a whole number of blocks and of pages.

    Raises:
      GeometryError: ``scale`` does not divide a block, or a page and a block do not divide.
    """
    if scale < 1 or BLOCK_LEN % scale:
        raise GeometryError(f"{scale=} must divide the trace's blocks of {BLOCK_LEN} tokens")
    block_len = BLOCK_LEN // scale
    if block_len % page_size and page_size % block_len:
        raise GeometryError(
            f"{page_size=} and blocks of {block_len} tokens ({BLOCK_LEN} / {scale=}) must be "
            f"multiples of one another"
        )
    return max(block_len, page_size)


def make_jobs(requests: Iterable[Request], scale: int, page_size: int) -> list[Job]:
    """The requests with every length divided by ``scale``, in units that a pool can cache.

    Full blocks stay full and equal prefixes stay equal; a partial block is never cached.

    Raises:
      GeometryError: as ``unit_len``.
    """
    unit = unit_len(scale, page_size)
    block_len = BLOCK_LEN // scale
    jobs = []
    for number, request in enumerate(requests):
        input_len = max(1, request.input_len * block_len // BLOCK_LEN)
        blocks_per_unit = unit // block_len
        num_units = request.input_len // BLOCK_LEN // blocks_per_unit
        # An id stands for all blocks up to its own, so the last of a unit names the unit.
        units = request.block_ids[blocks_per_unit - 1 :: blocks_per_unit][:num_units]
        output_len = max(1, request.output_len // scale)
        jobs.append(Job(number, request.arrival_ms, input_len, output_len, units))
    return jobs
