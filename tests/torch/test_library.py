"""kvtorch's operations as torch's custom ops: what they change, and what compilers make of it."""

import dataclasses
import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from kvtorch.ops import (
    library,
    read_quantized,  # noqa: F401  which defines the op
    read_quantized_kv,  # noqa: F401
    write_quantized,  # noqa: F401
    write_quantized_kv,  # noqa: F401
)
from kvtorch.ops.move_rows import move_rows
from kvtorch.ops.read_latent_rope import read_latent_rope
from kvtorch.ops.read_rows import read_rows
from kvtorch.ops.write_latent_rope import write_latent_rope
from kvtorch.ops.write_rows import write_rows
from tests import oracles
from tests.strategies import random_rows
from tests.torch.tensors import to_numpy, to_torch

OPS = torch.ops.kvtorch
CHANGED = {
    "write_rows": {"planes"},
    "move_rows": {"planes"},
    "write_latent_rope": {"plane"},
    "read_latent_rope": set(),
    "write_quantized": {"planes"},
    "read_quantized": set(),
    "write_quantized_kv": {"planes"},
    "read_quantized_kv": set(),
}
FIRST_SLOT = 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclasses.dataclass
class Cache:
    """Two planes of two layers, and one of latent rows."""

    k: Any
    v: Any
    latents: Any

    @classmethod
    def create(cls, device, dtype="bfloat16", num_rows=32):
        rows = [((2, 8), dtype), ((1, 16), "float32"), ((1, 24), dtype)]
        return cls(*(to_torch(plane, device) for plane in random_rows(0, rows, 2, num_rows)))

    @property
    def planes(self):
        return [self.k, self.v]

    @property
    def all(self):
        return [self.k, self.v, self.latents]


def copy_of(cache):
    return Cache(*(plane.clone() for plane in cache.all))


def assert_same(cache, other):
    for actual, expected in zip(cache.all, other.all, strict=True):
        oracles.assert_same_bits(to_numpy(actual), to_numpy(expected))


@pytest.mark.parametrize("name", CHANGED)
def test_schemas_say_what_is_changed(name):
    arguments = getattr(OPS, name).default._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == CHANGED[name]


def arguments(name, device):
    cache = Cache.create(device)
    slots = torch.tensor([4, -1, 9], device=device)
    k, v = torch.ones(3, 2, 8, device=device), torch.ones(3, 1, 16, device=device)
    scale = torch.tensor(2.0, device=device)
    latent, rope = torch.ones(3, 1, 24, device=device).split([16, 8], -1)
    quantized = [
        torch.zeros(2, 32, 1, width, dtype=dtype, device=device)
        for width, dtype in ((16, torch.uint8), (1, torch.float32), (8, torch.bfloat16))
    ]
    quantized_kv = [
        torch.zeros(2, 32, 2, width, dtype=dtype, device=device)
        for width, dtype in (
            (8, torch.int8),
            (1, torch.float32),
            (8, torch.int8),
            (1, torch.float32),
        )
    ]
    return {
        "write_rows": (cache.planes, 1, slots, [k, v], 4, [2.0, None], [None, scale], []),
        "move_rows": (cache.planes, slots, slots + 1, 4, False),
        "write_latent_rope": (cache.latents, 1, slots, latent, rope, 4),
        "read_latent_rope": (cache.latents, 1, slots, 16, 4, torch.float32, torch.bfloat16),
        "write_quantized": (quantized, 1, slots, latent, rope, 4),
        "read_quantized": (quantized, 1, slots, 4, torch.float32),
        "write_quantized_kv": (quantized_kv, 1, slots, k, k * 2, 4),
        "read_quantized_kv": (quantized_kv, 1, slots, 4, torch.float32),
    }[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHANGED)
def test_torch_finds_nothing_wrong_with_the_ops(name, device):
    assert set(torch.library.opcheck(getattr(OPS, name).default, arguments(name, device))) >= {
        "test_schema",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    }


def test_an_op_that_changes_what_it_does_not_say_is_caught():
    def zero(plane):
        plane.zero_()

    library.define("for_test_only(Tensor plane) -> ()", zero)
    with pytest.raises(Exception, match="not defined as mutable but was mutated"):
        torch.library.opcheck(OPS.for_test_only.default, (torch.ones(3),), test_utils="test_schema")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_read_of_tensors_without_contents_has_shapes_and_dtypes(dtype):
    with FakeTensorMode():
        plane = torch.empty(2, 9, 1, 24, dtype=torch.bfloat16, device="cuda")
        slots = torch.empty(5, dtype=torch.int32, device="cuda")
        parts = read_latent_rope(plane, 1, slots, 16, first_slot=4, dtype=dtype)
    assert [tuple(part.shape) for part in parts] == [(5, 1, 16), (5, 1, 8)]
    assert {(part.dtype, part.device.type) for part in parts} == {(dtype, "cuda")}


def decode(cache, slots, sources, k, v):
    """Two layers; the values of the second depend on what was read in the first; then a move."""
    for layer in range(2):
        write_rows(cache.planes, layer, slots, [k, v], first_slot=FIRST_SLOT, scales=[2.0, None])
        rows, others = read_rows(cache.planes, layer, slots, first_slot=FIRST_SLOT)
        k, v = k + rows.float(), v + others
        parts = k.flatten(1)[:, None], v[..., :8]
        write_latent_rope(cache.latents, layer, slots, *parts, first_slot=FIRST_SLOT)
        latent, rope = read_latent_rope(
            cache.latents, layer, slots, 16, first_slot=FIRST_SLOT, dtype=torch.float32
        )
        v = v * 0.5 + latent + rope.sum()
    move_rows(cache.planes, slots, sources, first_slot=FIRST_SLOT)
    return v


def step_inputs(device, num_tokens=5, start=3):
    slots = torch.arange(start, start + num_tokens, device=device)
    k, v = torch.ones(num_tokens, 2, 8, device=device), torch.ones(num_tokens, 1, 16, device=device)
    return slots, slots.roll(1), k, v


def check_step(compiled, cache, *inputs):
    """Compiled, the step changes the same memory in the same way."""
    expected, addresses = copy_of(cache), [plane.data_ptr() for plane in cache.all]
    with torch.no_grad():
        result, wanted = compiled(cache, *inputs), decode(expected, *inputs)
    torch.testing.assert_close(result, wanted, rtol=0, atol=0)  # numbers that all sums are exact of
    assert_same(cache, expected)
    assert [plane.data_ptr() for plane in cache.all] == addresses


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_step_in_one_graph(dtype):
    torch._dynamo.reset()
    compiled = torch.compile(decode, backend="aot_eager", fullgraph=True)
    check_step(compiled, Cache.create("cpu", dtype), *step_inputs("cpu"))


def inductors_graphs(function, *args):
    """The graphs that Inductor generates code from, and what they return when run as they are."""
    graphs = []

    def compiler(graph, fake_args):
        with V.set_fake_mode(detect_fake_mode(fake_args)):
            post_grad_passes(graph, is_inference=True)
        graph.recompile()
        graphs.append(graph.graph)
        return graph

    backend = aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    return graphs


def copied(graphs, shapes):
    """What is copied in the graphs, of tensors as large as planes."""
    names = {"aten.clone.default", "aten.copy.default", "aten.copy_.default"}
    for node in (node for graph in graphs for node in graph.nodes):
        to_itself = len(node.args) > 1 and node.args[0] is node.args[1]  # Inductor drops it
        if str(node.target) in names and not to_itself:
            numel = node.args[0].meta["val"].numel()
            if numel in {shape.numel() for shape in shapes}:
                yield node


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_inductor_copies_no_plane(dtype):
    cache = Cache.create("cpu", dtype)
    graphs = inductors_graphs(decode, cache, *step_inputs("cpu"))
    targets = [str(node.target) for graph in graphs for node in graph.nodes]
    assert targets.count("kvtorch.write_rows.default") == 2
    assert targets.count("kvtorch.move_rows.default") == 1
    assert not list(copied(graphs, [plane.shape for plane in cache.all]))


def test_inductor_copies_no_plane_that_is_read_through_another_view():
    """As engines have the views of layers that a pool keeps."""

    def write_and_read(planes, views, slots, rows):
        for layer in range(2):
            write_rows(planes, layer, slots, rows, first_slot=FIRST_SLOT)
            rows = [row + view[:5].sum() for row, view in zip(rows, views[layer], strict=True)]
        return rows

    cache = Cache.create("cpu", "float32")
    views = [[plane[layer] for plane in cache.planes] for layer in range(2)]
    slots, _, *rows = step_inputs("cpu")
    graphs = inductors_graphs(write_and_read, cache.planes, views, slots, rows)
    assert not list(copied(graphs, [cache.k.shape, cache.v.shape]))


def test_a_copy_of_a_plane_is_seen():
    """What the tests above look for: a plane seen as another dtype in the graph is copied."""

    def view_and_write(plane, slots, rows):
        plane = plane.view(torch.float8_e4m3fn)
        write_rows([plane], 1, slots, [rows], first_slot=FIRST_SLOT)

    plane = Cache.create("cpu", "uint8").k
    slots, _, rows, _ = step_inputs("cpu")
    assert list(copied(inductors_graphs(view_and_write, plane, slots, rows), [plane.shape]))


@pytest.mark.gpu
def test_a_step_compiled_by_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(decode, fullgraph=True)
    cache = Cache.create("cuda", "float8_e4m3fn", num_rows=1 << 20)
    check_step(compiled, cache, *step_inputs("cuda"))
    smallest = min(plane.nbytes for plane in cache.all)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        compiled(cache, *step_inputs("cuda"))
    assert torch.cuda.max_memory_allocated() - before < smallest // 2


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [5, 4097])
def test_a_captured_step_is_replayed_with_other_slots(num_tokens):
    cache = Cache.create("cuda", "float8_e4m3fn", num_rows=3 * num_tokens)
    inputs = step_inputs("cuda", num_tokens)
    decode(copy_of(cache), *inputs)  # compiles
    torch.cuda.synchronize()
    expected = copy_of(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = decode(cache, *inputs)
    assert_same(cache, expected)
    for start in (3, num_tokens, -1):
        for tensor, new in zip(inputs, step_inputs("cuda", num_tokens, start), strict=True):
            tensor.copy_(new)
        graph.replay()
        wanted = decode(expected, *(tensor.clone() for tensor in inputs))
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
        assert_same(cache, expected)


@functools.cache
def many(device):
    return Cache.create(device, "bfloat16", num_rows=3000)


@pytest.mark.gpu
def test_each_operation_sees_what_the_ones_before_it_did():
    """Kernels start before the one before ends; 300 times, and the last rows depend on all."""
    rng = torch.Generator().manual_seed(0)
    on_gpu, on_cpu = many("cuda"), copy_of(many("cpu"))
    for turn in range(300):
        slots = torch.randperm(2996, generator=rng)[:1000] + 4
        sources = slots[torch.randperm(1000, generator=rng)]
        for cache in (on_gpu, on_cpu):
            device = cache.k.device
            a, b = slots.to(device), sources.to(device)
            layer = turn % 2
            parts = read_latent_rope(cache.latents, layer, a, 16, first_slot=FIRST_SLOT)
            write_latent_rope(cache.latents, 1 - layer, b, *parts, first_slot=FIRST_SLOT)
            move_rows(cache.planes, a, b, first_slot=FIRST_SLOT)
            rows = read_rows(cache.planes, layer, a, first_slot=FIRST_SLOT)
            write_rows(cache.planes, 1 - layer, b, rows, first_slot=FIRST_SLOT)
            move_rows([cache.latents], b, a, first_slot=FIRST_SLOT)
    assert_same(on_gpu, on_cpu)
