"""Where is every row that somebody may still read, and what should it hold?"""

import dataclasses

import numpy as np

from kvjax.replay import content
from kvjax.replay.batch import Running
from kvjax.replay.data_plane import page_slots
from kvjax.replay.prefix_index import Unit, device_pages, host_slots
from kvjax.replay.scheduler import Scheduler, Settings


@dataclasses.dataclass(frozen=True)
class LiveRows:
    """Slots of one tier, and what decides the ``content`` of each."""

    slots: np.ndarray
    tags: np.ndarray
    positions: np.ndarray

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, which: slice | np.ndarray) -> "LiveRows":
        return LiveRows(self.slots[which], self.tags[which], self.positions[which])


def on_device(scheduler: Scheduler) -> LiveRows:
    """The rows of cached units and of running requests."""
    settings = scheduler.settings
    units = list(scheduler.index.on_device())
    parts = [_of_units(units, page_slots(device_pages(units), settings.page_size), settings)]
    parts += [_of_request(request, length, settings) for request, length in scheduler.batch]
    return LiveRows(
        np.concatenate([part.slots for part in parts]),
        np.concatenate([part.tags for part in parts]),
        np.concatenate([part.positions for part in parts]),
    )


def on_host(scheduler: Scheduler) -> LiveRows:
    """The rows of units in the host tier."""
    units = list(scheduler.index.on_host())
    slots = host_slots(units, scheduler.settings.unit_len)
    return _of_units(units, slots, scheduler.settings)


def _of_units(units: list[Unit], slots: np.ndarray, settings: Settings) -> LiveRows:
    keys = np.array([unit.key for unit in units], np.int64)
    depths = np.array([unit.depth for unit in units], np.int32)
    return LiveRows(
        slots,
        np.repeat(content.unit_tags(keys), settings.unit_len),
        # The depth is to the unit what a page's number is to its slots.
        page_slots(depths, settings.unit_len).astype(np.uint32),
    )


def _of_request(request: Running, seq_len: int, settings: Settings) -> LiveRows:
    """The rows behind the cached units that a running request uses."""
    start = len(request.path) * settings.unit_len
    slots = page_slots(np.array(request.pages, np.int32), settings.page_size)
    numbers = np.full(seq_len - start, request.job.number, np.int64)
    return LiveRows(
        slots[: seq_len - start],
        content.request_tags(numbers),
        np.arange(start, seq_len, dtype=np.uint32),
    )
