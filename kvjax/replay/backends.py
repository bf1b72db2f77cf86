"""Which frameworks serve a replay, and on which memory?"""

import dataclasses
import importlib.util

from kvjax.errors import UnsupportedError
from kvjax.geometry import Geometry
from kvjax.replay.both_backends import BothPages, BothRows, Comparison
from kvjax.replay.pooled_plane import PooledPlane
from kvjax.replay.scheduler import Settings

NAMES = ("jax", "torch", "both")


@dataclasses.dataclass(frozen=True)
class Backend:
    """One of ``NAMES``, and for both on one memory, the operations of a turn."""

    name: str = "jax"
    turn_len: int | None = None


def require(backend: Backend) -> None:
    """Finds out before the replay whether the backend can serve.

    Raises:
      UnsupportedError: something is not installed, or JAX and torch have no memory in common.
    """
    if backend.name == "jax":
        return
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"--backend {backend.name} needs {' and '.join(missing)}: pip install 'kvjax[torch]'"
        )
    if backend.turn_len is not None:
        import jax

        from kvjax.replay import torch_plane

        on = {"jax": jax.default_backend(), "torch": torch_plane.default_device()}
        if (on["jax"] == "gpu") != (on["torch"] == "cuda"):
            raise UnsupportedError(
                f"--share needs one memory, but JAX is on {on['jax']} and torch on {on['torch']}"
            )


def create(
    backend: Backend, geometry: Geometry, settings: Settings
) -> tuple[PooledPlane, Comparison | None]:
    """Allocates everything; with two backends, also what compares them.

    Raises:
      MemoryError: there is no room.
    """
    # Both frameworks take a while to load, which refusing input does not need.
    if backend.name == "jax":
        from kvjax.replay import kvjax_plane

        return PooledPlane(*kvjax_plane.create(geometry, settings), settings.page_size), None
    from kvjax.replay import torch_plane

    torch_plane.use_one_thread()
    device = torch_plane.default_device()
    if backend.name == "torch":
        pages, rows = torch_plane.create(geometry, settings, device)
        return PooledPlane(pages, rows, settings.page_size), None
    from kvjax.replay import kvjax_plane
    from kvjax.replay.shared_rows import SharedRows

    comparison = Comparison()
    if backend.turn_len is None:
        jax_pages, jax_rows = kvjax_plane.create(geometry, settings)
        torch_pages, torch_rows = torch_plane.create(geometry, settings, device)
        rows = BothRows({"jax": jax_rows, "torch": torch_rows}, comparison)
    else:
        no_host = dataclasses.replace(settings, host_units=0)
        torch_pages, torch_rows = torch_plane.create(geometry, no_host, device)
        jax_pages = kvjax_plane.KvjaxPages(settings)
        host_slots = settings.host_units * settings.unit_len
        rows = SharedRows(
            torch_rows, kvjax_plane.KvjaxRows, host_slots, backend.turn_len, comparison
        )
    pages = BothPages({"jax": jax_pages, "torch": torch_pages}, comparison)
    return PooledPlane(pages, rows, settings.page_size), comparison
