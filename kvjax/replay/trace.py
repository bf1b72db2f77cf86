"""Which requests does a trace file hold?

The format is that of the Mooncake traces (FAST'25): one JSON object a line, in order of arrival,

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

with the arrival in milliseconds and one id for each started block of 512 input tokens. An id
stands for its block and everything before it, so that equal ids are equal prefixes.
"""

import dataclasses
import json
import pathlib
import reprlib
from collections.abc import Iterator
from typing import Any

BLOCK_LEN = 512

# The longest context of any published model, Llama 4 Scout's. Lengths above it are typing errors.
MAX_LEN = 10_000_000

# Above it, floats no longer tell one millisecond from the next.
MAX_MS = 2**53


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request, as published: ``block_ids`` has an entry for every started block of input."""

    arrival_ms: float
    input_len: int
    output_len: int
    block_ids: tuple[int, ...]


def read(path: pathlib.Path, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests of a trace file; all of them by default.

    Block ids are renumbered in order of appearance: other writers of the format use large hashes.

    Raises:
      OSError: the file cannot be read.
      ValueError: a line is not a request, or not one that can follow those before it; the message
        begins with the file and the line.
    """
    requests = []
    prefixes = _Prefixes()
    arrival_ms = 0.0
    for number, line in _lines(path):
        if len(requests) == limit:
            break
        try:
            request = _parse(line)
            if request.arrival_ms < arrival_ms:
                raise ValueError(
                    f"timestamp={request.arrival_ms:g} is before the previous request's "
                    f"{arrival_ms:g}; a trace is sorted by time"
                )
            block_ids = prefixes.number(request.block_ids)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        arrival_ms = request.arrival_ms
        requests.append(dataclasses.replace(request, block_ids=block_ids))
    if not requests:
        raise ValueError(f"{path}:1: the trace holds no request")
    return requests


def _lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _parse(line: bytes) -> Request:
    try:
        fields = json.loads(line, object_pairs_hook=_fields)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object but {type(fields).__name__}")
    needed = ("timestamp", "input_length", "output_length", "hash_ids")
    if missing := [name for name in needed if name not in fields]:
        raise ValueError(f"missing {', '.join(missing)}")
    timestamp = fields["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise ValueError(f"timestamp={reprlib.repr(timestamp)} must be a number of milliseconds")
    if not 0 <= timestamp <= MAX_MS:  # nor is NaN
        raise ValueError(
            f"timestamp={reprlib.repr(timestamp)} must be from 0 to 2**53 milliseconds"
        )
    input_len = _length(fields, "input_length", at_least=1)
    output_len = _length(fields, "output_length", at_least=0)
    hash_ids = fields["hash_ids"]
    if not isinstance(hash_ids, list) or not all(_is_count(value) for value in hash_ids):
        raise ValueError("hash_ids must be a list of integers of at least 0")
    blocks = -(-input_len // BLOCK_LEN)
    if len(hash_ids) != blocks:
        raise ValueError(
            f"{len(hash_ids)} hash_ids do not cover input_length={input_len}, which takes "
            f"{blocks} blocks of {BLOCK_LEN} tokens"
        )
    return Request(timestamp, input_len, output_len, tuple(hash_ids))


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has two values for one key")
    return fields


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _length(fields: dict[str, Any], name: str, at_least: int) -> int:
    value = fields[name]
    if not _is_count(value) or not at_least <= value <= MAX_LEN:
        raise ValueError(
            f"{name}={reprlib.repr(value)} must be an integer from {at_least} to {MAX_LEN:,}"
        )
    return value


class _Prefixes:
    """Numbers block ids in order of appearance, and holds every id to one predecessor."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._parents: list[int] = []

    def number(self, hash_ids: tuple[int, ...]) -> tuple[int, ...]:
        numbers = []
        parent = -1
        for position, hash_id in enumerate(hash_ids):
            number = self._numbers.setdefault(hash_id, len(self._parents))
            if number == len(self._parents):
                self._parents.append(parent)
            elif self._parents[number] != parent:
                raise ValueError(
                    f"hash_ids[{position}]={hash_id} has followed another block before; an id "
                    f"stands for a whole prefix, so it always has the same predecessor"
                )
            parent = number
            numbers.append(number)
        return tuple(numbers)
