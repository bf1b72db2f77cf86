"""Is every row what it should be, and every page somebody's?"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from kvjax.replay import content, live_rows
from kvjax.replay.data_plane import ReadablePlane
from kvjax.replay.live_rows import LiveRows
from kvjax.replay.scheduler import Scheduler

_CHUNK_ROWS = 1024  # tokens read back in one call
_MESSAGES = 5  # wrong rows that are described, the others are counted


@dataclasses.dataclass
class Verdict:
    """Rows looked at (one token in one layer, all planes) and what was wrong."""

    sampled_rows: int = 0
    device_rows: int = 0
    host_rows: int = 0
    wrong_rows: int = 0
    messages: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything so far was as it should be."""
        return not self.messages


class Verifier:
    """Checks what ``scheduler`` has put into ``plane``; the findings are in ``verdict``."""

    def __init__(self, scheduler: Scheduler, plane: ReadablePlane, seed: int) -> None:
        self.verdict = Verdict()
        self._scheduler = scheduler
        self._plane = plane
        self._random = np.random.default_rng(seed)

    def sample(self, count: int) -> None:
        """Checks ``count`` random live device rows in one random layer."""
        rows = live_rows.on_device(self._scheduler)
        if not len(rows):
            return
        rows = rows[self._random.integers(len(rows), size=count)]
        layer_id = self._layer_id()
        found = self._plane.read_layer(layer_id, rows.slots)
        found = tuple(plane[None] for plane in found)
        self._compare("sampled", found, range(layer_id, layer_id + 1), rows)
        self.verdict.sampled_rows += len(rows)

    def read_layer(self) -> None:
        """Reads all live device rows of a random layer, for a plane that compares what it reads."""
        self._plane.read_layer(self._layer_id(), live_rows.on_device(self._scheduler).slots)

    def read_back(self, progress: Callable[[int], None]) -> None:
        """Checks every live row of both tiers in every layer; ``progress`` gets tokens done."""
        tokens = 0
        layer_ids = range(self._plane.layers.start, self._plane.layers.stop)
        for chunk in _chunks(live_rows.on_device(self._scheduler)):
            self._compare("device", self._plane.read(chunk.slots), layer_ids, chunk)
            self.verdict.device_rows += len(chunk) * len(layer_ids)
            progress(tokens := tokens + len(chunk))
        for chunk in _chunks(live_rows.on_host(self._scheduler)):
            self._compare("host", self._plane.read_host(chunk.slots), layer_ids, chunk)
            self.verdict.host_rows += len(chunk) * len(layer_ids)
            progress(tokens := tokens + len(chunk))

    def audit(self) -> dict[str, int]:
        """Accounts for every page: free + used + cached = total, and each has one owner."""
        settings = self._scheduler.settings
        cached = [page for unit in self._scheduler.index.on_device() for page in unit.pages]
        used = [page for request, _ in self._scheduler.batch for page in request.pages]
        account = {
            "free": self._plane.num_free_pages(),
            "used": len(used),
            "cached": len(cached),
            "total": settings.num_pages,
        }
        if account["free"] + account["used"] + account["cached"] != account["total"]:
            self.verdict.messages.append(f"pages do not add up: {account}")
        owned = np.array(cached + used, np.int64)
        if len(np.unique(owned)) != len(owned):
            self.verdict.messages.append("a page has two owners")
        if not np.all((owned >= 1) & (owned <= settings.num_pages)):
            self.verdict.messages.append("an owner has a page that is not there")
        return account

    def _layer_id(self) -> int:
        layers = self._plane.layers
        return int(self._random.integers(layers.start, layers.stop))

    def _compare(
        self, where: str, found: tuple[np.ndarray, ...], layer_ids: range, rows: LiveRows
    ) -> None:
        expected = content.expected_rows(self._plane.planes, layer_ids, rows.tags, rows.positions)
        differs = np.stack(
            [
                (got != wanted).reshape(len(layer_ids), len(rows), -1).any(-1)
                for got, wanted in zip(found, expected, strict=True)
            ]
        )
        self.verdict.wrong_rows += int(differs.any(0).sum())
        for plane, layer, row in np.argwhere(differs):
            if len(self.verdict.messages) >= _MESSAGES:
                break
            self.verdict.messages.append(
                f"{where} slot {rows.slots[row]}, layer {layer_ids[layer]}, plane "
                f"{self._plane.planes[plane].name}: not the row of "
                f"{content.describe_tag(int(rows.tags[row]))} at position {rows.positions[row]}"
            )


def _chunks(rows: LiveRows) -> Iterator[LiveRows]:
    for start in range(0, len(rows), _CHUNK_ROWS):
        yield rows[start : start + _CHUNK_ROWS]
