"""JAX and torch serve the same requests, each in its memory or both in one."""

import dataclasses
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

import kvjax.__main__ as command
from kvjax.replay import backends, torch_plane
from kvjax.replay.backends import Backend
from kvjax.replay.both_backends import BackendsDiffer, BothPages, Comparison
from kvjax.replay.kvjax_plane import KvjaxPages, KvjaxRows
from kvjax.replay.pooled_plane import PooledPlane
from kvjax.replay.scheduler import Scheduler
from kvjax.replay.torch_plane import TorchPages, TorchRows
from kvjax.replay.verify import Verifier
from tests.replay.workloads import (
    ENGINE,
    GEOMETRIES,
    QUANTIZED,
    WIDE,
    WIDE_QUANTIZED,
    make_jobs,
)

GEOMETRY = GEOMETRIES["mha-bfloat16-float8_e4m3fn"]
LATENT = GEOMETRIES["mla-bfloat16"]
LATENT_QUANTIZED = QUANTIZED["mla-quantized-bfloat16"]
APART, SHARED = Backend("both"), Backend("both", turn_len=3)


def serve(backend, geometry=GEOMETRY, settings=ENGINE):
    """Serves and reads everything back; the scheduler says how far it came."""
    plane, comparison = backends.create(backend, geometry, settings)
    scheduler = Scheduler(make_jobs(60), plane, settings)
    verifier = Verifier(scheduler, plane, seed=0)
    for _ in scheduler.steps():
        verifier.sample(8)
        verifier.read_layer()
    verifier.read_back(lambda tokens: None)
    verifier.audit()
    return plane, comparison, scheduler, verifier.verdict


def check(backend, geometry, settings=ENGINE):
    plane, comparison, scheduler, verdict = serve(backend, geometry, settings)
    stats = scheduler.stats
    assert min(stats.restored_tokens, stats.offloaded_tokens, stats.moved_tokens) > 0
    assert verdict.messages == []
    assert min(verdict.device_rows, verdict.host_rows) > 0
    assert comparison.rows >= verdict.device_rows
    written = stats.prefill_tokens + stats.decode_tokens + stats.restored_tokens
    assert comparison.slots >= written
    assert min(comparison.seconds[name] for name in ("jax", "torch")) > 0
    return plane, comparison


@pytest.mark.parametrize(
    "geometry",
    [GEOMETRY, LATENT_QUANTIZED, QUANTIZED["mha-int8"]],
    ids=["mha", "mla-quantized", "mha-int8"],
)
def test_both_do_the_same(geometry):
    check(APART, geometry)


@pytest.mark.parametrize(
    "geometry",
    [GEOMETRY, LATENT, LATENT_QUANTIZED, QUANTIZED["mha-fp8"]],
    ids=["mha", "mla", "mla-quantized", "mha-fp8"],
)
def test_both_do_the_same_in_one_memory(geometry):
    plane, comparison = check(SHARED, geometry)
    plane.rows.give_back()
    assert comparison.turns > 60
    assert plane.rows.torch_rows.pool.audit() == []


def test_allocators_of_single_slots_do_the_same():
    settings = dataclasses.replace(ENGINE, page_size=1, num_pages=80)
    comparison = Comparison()
    torch_pages, rows = torch_plane.create(
        dataclasses.replace(GEOMETRY, page_size=1), settings, "cpu"
    )
    pages = BothPages({"jax": KvjaxPages(settings), "torch": torch_pages}, comparison)
    scheduler = Scheduler(make_jobs(60), PooledPlane(pages, rows, 1), settings)
    for _ in scheduler.steps():
        pages.num_free()
    assert comparison.slots > scheduler.stats.prefill_tokens


@pytest.mark.gpu
@pytest.mark.parametrize("turn_len", [None, 1], ids=["apart", "shared"])
@pytest.mark.parametrize("name", WIDE | WIDE_QUANTIZED)
def test_both_do_the_same_on_a_gpu(name, turn_len):
    check(Backend("both", turn_len), (WIDE | WIDE_QUANTIZED)[name])


def drops_a_row(write):
    def faulty(self, slots, tags, positions):
        slots = slots.copy()
        slots[len(slots) // 2 :][:1] = -1  # is written nowhere
        write(self, slots, tags, positions)

    return faulty


def swaps_two_slots(write):
    def faulty(self, slots, tags, positions):
        slots = slots.copy()
        slots[:2] = slots[:2][::-1].copy()
        write(self, slots, tags, positions)

    return faulty


def leaves_a_page_stale(restore):
    def faulty(self, slots, host_slots):
        restore(self, slots[ENGINE.page_size :], host_slots[ENGINE.page_size :])

    return faulty


def moves_one_after_the_other(move):
    def faulty(self, dst, src):
        for i in range(len(dst)):
            move(self, dst[i : i + 1], src[i : i + 1])

    return faulty


FAULTS = [
    ("write", drops_a_row),
    ("write", swaps_two_slots),
    ("restore", leaves_a_page_stale),
    ("move", moves_one_after_the_other),
]


@pytest.mark.parametrize("method, fault", FAULTS)
def test_a_fault_in_one_memory_is_a_difference(monkeypatch, method, fault):
    monkeypatch.setattr(TorchRows, method, fault(getattr(TorchRows, method)))
    with pytest.raises(BackendsDiffer, match=r"^device slot \d+, layer [345], plane [kv]: element"):
        serve(APART)


@pytest.mark.parametrize("rows", [KvjaxRows, TorchRows])
@pytest.mark.parametrize("method, fault", [("write", drops_a_row), ("put", None)])
def test_a_fault_of_one_in_the_memory_of_both_is_a_wrong_row(monkeypatch, rows, method, fault):
    def puts_nothing(self, slots, bits):
        del self, slots, bits

    faulty = puts_nothing if fault is None else fault(getattr(rows, method))
    monkeypatch.setattr(rows, method, faulty)
    *_, verdict = serve(SHARED)
    assert verdict.wrong_rows > 0
    assert "not the row of" in verdict.messages[0]


def doubles_a_scale(write):
    def faulty(self, slots, tags, positions):
        write(self, slots, tags, positions)
        self.pool.planes[1][-1, int(slots[0]), 0] *= 2

    return faulty


SCALES = [(LATENT_QUANTIZED, "scale"), (QUANTIZED["mha-int8"], "k_scale")]


@pytest.mark.parametrize("geometry, name", SCALES, ids=["mla", "mha"])
def test_another_scale_in_one_memory_is_a_difference(monkeypatch, geometry, name):
    monkeypatch.setattr(TorchRows, "write", doubles_a_scale(TorchRows.write))
    with pytest.raises(BackendsDiffer, match=rf"^device slot \d+, layer 5, plane {name}: element"):
        serve(APART, geometry)


@pytest.mark.parametrize("geometry, name", SCALES, ids=["mla", "mha"])
def test_another_scale_in_the_memory_of_both_is_a_wrong_row(monkeypatch, geometry, name):
    monkeypatch.setattr(TorchRows, "write", doubles_a_scale(TorchRows.write))
    *_, verdict = serve(SHARED, geometry)
    assert verdict.wrong_rows > 0
    assert f"layer 5, plane {name}: not the row of" in verdict.messages[0]


def test_reading_the_shared_memory_differently_is_a_difference(monkeypatch):
    read = TorchRows.read
    monkeypatch.setattr(TorchRows, "read", lambda *args: tuple(bits ^ 1 for bits in read(*args)))
    with pytest.raises(BackendsDiffer, match="in jax, 0x"):
        plane, *_ = backends.create(SHARED, GEOMETRY, ENGINE)
        plane.read(np.arange(8, dtype=np.int32))


def test_handing_out_other_slots_is_a_difference(monkeypatch):
    decode = TorchPages.decode
    monkeypatch.setattr(TorchPages, "decode", lambda *args: decode(*args)[::-1])
    with pytest.raises(
        BackendsDiffer, match=r"^decode: token \d+ gets slot \d+ from jax, \d+ from"
    ):
        serve(APART)


def test_keeping_pages_is_a_difference(monkeypatch):
    free = TorchPages.free
    monkeypatch.setattr(TorchPages, "free", lambda self, pages: free(self, pages[1:]))
    with pytest.raises((BackendsDiffer, AssertionError)):
        serve(APART)


OPTIONS = ["--requests", "40", "--scale", "64", "--page-size", "4", "--concurrency", "4"]
OPTIONS += ["--layers", "2", "--head-dim", "8", "--compact-every", "9", "--verify-every", "5"]
OPTIONS += ["--pool", "1024tokens", "--host-pool", "640tokens"]


def replay(*options):
    return command.main(["replay", *OPTIONS, "--backend", "both", *options])


@pytest.fixture(autouse=True)
def _as_many_threads_as_before():
    """A replay keeps torch to one."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_the_summary_says_what_was_compared(capsys):
    assert replay() == 0
    printed = capsys.readouterr().out
    assert " slots handed out, " in printed
    assert "\nby backend    jax " in printed
    assert printed.endswith("verified, bit for bit\n")


def test_json_counts_the_turns(capsys):
    assert replay("--share", "10", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verification"]["ok"] is True
    comparison = result["comparison"]
    assert min(comparison["rows"], comparison["slots"], comparison["turns"]) > 0
    assert set(comparison["seconds"]) == {"jax", "torch", "lending"}


def test_a_difference_fails_the_replay(capsys, monkeypatch):
    monkeypatch.setattr(TorchRows, "write", drops_a_row(TorchRows.write))
    assert replay() == 1
    printed = capsys.readouterr().out
    assert "WRONG         after step " in printed
    assert ", device slot " in printed
    assert printed.endswith("FAILED\n")


def test_torch_alone_is_replayed(capsys):
    assert command.main(["replay", *OPTIONS, "--backend", "torch"]) == 0
    assert capsys.readouterr().out.endswith("verified, bit for bit\n")


def test_torch_alone_replays_quantized_rows(capsys):
    options = ["--latent-dim", "16", "--rope-dim", "4", "--quantization", "per_token_head"]
    served = [option for option in OPTIONS if option not in ("--head-dim", "8")]
    assert command.main(["replay", *served, *options, "--backend", "torch"]) == 0
    assert capsys.readouterr().out.endswith("verified, bit for bit\n")


def test_both_replay_quantized_heads(capsys):
    options = ["--quantization", "fp8_per_token_head", "--dtype", "float32", "--requests", "15"]
    assert replay(*options, "--share") == 0
    assert capsys.readouterr().out.endswith("verified, bit for bit\n")


def test_one_memory_needs_one_device(capsys, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setattr("kvjax.replay.torch_plane.default_device", lambda: "cpu")
    assert replay("--share") == 2
    assert "but JAX is on gpu and torch on cpu" in capsys.readouterr().err
