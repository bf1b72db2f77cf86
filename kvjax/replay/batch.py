"""Which requests are running, and how far is each?"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from kvjax.replay.jobs import Job
from kvjax.replay.prefix_index import Unit


@dataclasses.dataclass(slots=True)
class Running:
    """A request being served.

    Attributes:
      path: the cached units that hold its full blocks; it is a user of each.
      num_matched: how many of them it found, rather than filled.
      pages: those of the rest of its sequence, which nobody else sees.
    """

    job: Job
    path: list[Unit]
    num_matched: int
    pages: list[int] = dataclasses.field(default_factory=list)


class Batch:
    """Running requests by row, what a decode step needs of them in arrays.

    Attributes:
      rows: the rows in use.
      seq_lens: tokens of the sequence so far.
      last_slots: the slot of the last of them.
      left: tokens still to be generated.
    """

    def __init__(self, concurrency: int) -> None:
        self._requests: list[Running | None] = [None] * concurrency
        self.seq_lens = np.zeros(concurrency, np.int32)
        self.last_slots = np.zeros(concurrency, np.int32)
        self.left = np.zeros(concurrency, np.int32)
        self.numbers = np.zeros(concurrency, np.int64)
        self.rows = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Running:
        request = self._requests[row]
        assert request is not None
        return request

    def __iter__(self) -> Iterator[tuple[Running, int]]:
        """Each running request, with the length of its sequence."""
        return ((self[row], int(self.seq_lens[row])) for row in self.rows.tolist())

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be added."""
        return len(self._requests) - len(self.rows)

    def add(self, request: Running, last_slot: int) -> None:
        """Takes in a request whose input, ending at ``last_slot``, is in the pool."""
        row = self._requests.index(None)
        self._requests[row] = request
        self.seq_lens[row] = request.job.input_len
        self.last_slots[row] = last_slot
        self.left[row] = request.job.output_len
        self.numbers[row] = request.job.number
        self._find_rows()

    def pop_finished(self) -> list[Running]:
        """Takes out the requests that have nothing left to generate."""
        finished = self.rows[self.left[self.rows] == 0].tolist()
        requests = [self[row] for row in finished]
        for row in finished:
            self._requests[row] = None
        self._find_rows()
        return requests

    def _find_rows(self) -> None:
        self.rows = np.array(
            [row for row, request in enumerate(self._requests) if request is not None], np.int64
        )
