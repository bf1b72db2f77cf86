"""write_quantized_kv of kvtorch against NumPy's division and rounding, one head at a time."""

import itertools
from functools import partial
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

import triton
import triton.language as tl
from triton.runtime import interpreter

from kvjax.errors import UnsupportedError
from kvtorch.ops import quantizing
from kvtorch.ops.write_quantized_kv import write_quantized_kv
from tests import oracles
from tests.strategies import seeds, some_slots
from tests.torch import compiled, quantized
from tests.torch.implementations import (
    INTERPRETED,
    NAMES,
    call,
    device_of,
    for_examples,
    not_compiled,
    on_cases,
    tensors,
)
from tests.torch.quantized import FIRST_SLOT, FP8, INT8, LAYER, STORED, KvCase, assert_same_numbers
from tests.torch.tensors import LAYOUTS, to_numpy

FLOAT32 = np.finfo(np.float32)
LARGEST = {INT8: np.float32(127), FP8: np.float32(448)}
EXACTLY = ["reference", NAMES[2]]
"""Not Triton's interpreter, which rounds to fp8 in its own way and knows no NaN of it."""


def write(name, case, planes, slots, parts):
    """What becomes of the planes; ``parts`` are tensors, and keep their bits."""
    *stored, indices = tensors([*planes, slots], name)
    before = [to_numpy(part) for part in parts]
    result = call(
        *("write_quantized_kv", name, stored, LAYER, indices, *parts),
        first_slot=FIRST_SLOT,
        constants=case.constants,
    )
    assert result is None
    for tensor, expected in zip([indices, *parts], [slots, *before], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), expected)
    return [to_numpy(plane) for plane in stored]


def compare(write, case, planes, slots, values):
    """Rows that nobody wrote keep their bits, also where these are NaNs."""
    found = write(case, planes, slots, values)
    wanted = quantized.written_kv(planes, LAYER, slots, *values)
    there = [slot for slot in slots if FIRST_SLOT <= slot < case.num_rows]
    for actual, expected in zip(found, wanted, strict=True):
        assert_same_numbers(actual[LAYER, there], expected[LAYER, there])
        actual[LAYER, there] = expected[LAYER, there]
        oracles.assert_same_bits(actual, expected)


def write_by(name, case, planes, slots, values):
    return write(name, case, planes, slots, tensors(values, name))


@on_cases(
    reference=quantized.KV_REFERENCE,
    interpreted=quantized.KV_INTERPRETED,
    gpu=quantized.KV_FOR_GPU,
    reference_on_gpu=quantized.KV_REFERENCE_ON_GPU,
)
def test_equals_oracle(name, case):
    # Triton's interpreter casts to fp8 in its own way: there, numbers that need no rounding.
    exact = name == INTERPRETED and case.stored == FP8
    values = quantized.exact_heads if exact else quantized.any_heads

    def check(seed, slots, is_wide):
        slots = slots.astype(np.int64) if is_wide else slots
        planes = quantized.junk_planes(seed, case)
        compare(partial(write_by, name), case, planes, slots, values(seed, case))

    slots = some_slots(case.num_tokens, FIRST_SLOT, case.num_rows)
    for_examples(name, st.tuples(seeds, slots, st.booleans()), check)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", STORED)
def test_values_of_any_strides(name, layout, stored):
    case = KvCase(stored, 2, 16, 8, "float32", 3)
    values = quantized.exact_heads(0, case)
    parts = [layout(part, 2) for part in tensors(values, name)]
    planes, slots = quantized.junk_planes(1, case), np.array([6, 4, 9])
    compare(
        lambda case, planes, slots, _: write(name, case, planes, slots, parts),
        *(case, planes, slots, values),
    )


@pytest.mark.parametrize("name", NAMES)
def test_k_and_v_of_two_dtypes(name):
    case = KvCase(INT8, 2, 16, 8, "float32", 3)
    k, v = quantized.exact_heads(0, case)
    planes, slots = quantized.junk_planes(1, case), np.array([6, 4, 9])
    compare(partial(write_by, name), case, planes, slots, [k.astype("bfloat16"), v])


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_any_stride_and_fp8_that_is_bits(name):
    case = KvCase(FP8, 2, 16, 8, "float32", 3)
    values, planes = quantized.exact_heads(0, case), quantized.junk_planes(1, case)
    *stored, k, v = tensors([*planes, *values], name)
    stored = [plane.view(torch.uint8) if i % 2 == 0 else plane for i, plane in enumerate(stored)]
    slots = torch.tensor([5, 6, -1, 7, 9, 8], device=device_of(name))[::2]
    call("write_quantized_kv", name, stored, LAYER, slots, k, v, first_slot=FIRST_SLOT)
    wanted = quantized.written_kv(planes, LAYER, [5, -1, 9], *values)
    for plane, expected in zip(stored, wanted, strict=True):
        oracles.assert_same_bits(oracles.bits(to_numpy(plane)), oracles.bits(expected))


def write_all(name, stored, values):
    """Compares what is written of all tokens, as K and in other order as V, in a row of slots."""
    num_tokens, heads, dim = values.shape
    case = KvCase(stored, heads, dim, dim, str(values.dtype), num_tokens)
    slots = np.arange(FIRST_SLOT, FIRST_SLOT + num_tokens)
    planes = quantized.junk_planes(0, case)
    compare(partial(write_by, name), case, planes, slots, [values, values[::-1].copy()])


def every_bfloat16():
    return np.arange(1 << 16, dtype=np.uint16).view("bfloat16")


# Interpreted, int8 only.
EVERY = [
    *((stored, name) for stored in STORED for name in EXACTLY),
    (INT8, NAMES[1]),
]
every = pytest.mark.parametrize(
    "stored, name",
    [
        pytest.param(stored, *getattr(name, "values", [name]), marks=getattr(name, "marks", ()))
        for stored, name in EVERY
    ],
)
AMAXES = [0.0, 1e-26, 3e-5, 0.3, 1.0, 127.0, 448.0, 500.0, 3.3e38]


@every
def test_every_bfloat16_among_its_neighbours(stored, name):
    """So that the head's scale is of its magnitude; those that are no numbers are there too."""
    write_all(name, stored, every_bfloat16().reshape(-1, 8, 128))


@every
@pytest.mark.parametrize("amax", AMAXES)
def test_every_bfloat16_under_a_given_scale(amax, stored, name):
    """Every scale is another division."""
    amax = np.float32(amax).astype("bfloat16")
    values = every_bfloat16()
    is_small = np.abs(values.astype(np.float32)) <= amax.astype(np.float32)
    small = np.where(is_small, values, amax)
    small[::128] = amax
    write_all(name, stored, small.reshape(-1, 8, 128))


def neighbours(rng, values, farthest):
    """Numbers that are at most so many away; positive ones."""
    steps = rng.integers(-farthest, farthest + 1, values.shape, np.int32)
    return np.maximum(values.view(np.int32) + steps, 0).view(np.float32)


@triton.jit
def _divide(numbers, amaxes, scales, found, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    number, amax = tl.load(numbers + place), tl.load(amaxes + place)
    scale = tl.load(scales + place)
    tl.store(found + place, quantizing.quotients(number, amax, scale))


MANY = 1 << 16  # numbers that a program of the interpreter divides


def divided(name, number, amax, scale):
    """The quotients that the kernel makes; a multiple of ``MANY`` of them."""
    found = torch.empty(number.size, device=device_of(name))
    size = 1024 if name == "triton" else MANY
    arrays = tensors([number, amax, scale], name)
    _divide[(number.size // size,)](*arrays, found, size)
    return to_numpy(found)


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("stored", STORED)
def test_quotients_are_rounded_once(stored, name):
    """Those near the middle of two numbers of float32; also of scales that are hard to invert."""
    rng = np.random.default_rng(0)
    amax = (2.0 ** rng.uniform(-86, 118, 1 << 16)).astype(np.float32)
    scale = amax / LARGEST[stored]
    ones = (scale.view(np.int32) | 0x7FFFFF).view(np.float32)  # all bits of the mantissa
    is_hard = (ones * LARGEST[stored] / LARGEST[stored] == ones) & (rng.random(amax.shape) < 0.5)
    amax = np.where(is_hard, ones * LARGEST[stored], amax)
    scale = amax / LARGEST[stored]
    quotient = (2.0 ** rng.uniform(-40, np.log2(LARGEST[stored]), amax.shape)).astype(np.float32)
    quotient[::3] = 2.0 ** rng.integers(-40, 7, quotient[::3].shape)
    middle = (quotient.astype(np.float64) + np.nextafter(quotient, np.float32(np.inf))) / 2
    number = (middle * scale).astype(np.float32)
    number = neighbours(rng, number, 1)
    number = np.where(np.abs(number) <= amax, number, amax) * rng.choice([-1, 1], amax.shape)
    number[:2] = 0.0, -0.0
    number = number.astype(np.float32)
    oracles.assert_same_bits(divided(name, number, amax, scale), number / scale)


def near_middles():
    """All pairs whose quotient is so near to the middle of two numbers that an error may matter.

    Of mantissas A and B, of 24 bits, and M, an odd number of 25, A * 2^s / B = M + r / B, where s
    is 24 or 25. The corrected quotient, before it is rounded, is off by less than 3 / B: by what
    the product with the reciprocal is off, half a unit of each, times what the reciprocal is off.
    So r is 1, 2 or as much below 0.
    """
    for twos in (0, 1):
        b = np.arange(1 << 23, 1 << 24)
        b = b[b % (2 << twos) == 1 << twos]
        odd = b >> twos
        inverse = odd.copy()
        for _ in range(5):
            inverse *= 2 - odd * inverse  # modulo 2^64
        for shift, rest in itertools.product((24, 25), (-2, -1, 1, 2)):
            modulus = 1 << shift - twos
            if rest % (1 << twos):
                continue
            first = -(rest >> twos) * inverse & modulus - 1
            for turn in range((1 << 25) // modulus):
                middle = first + turn * modulus
                a = middle * b + rest >> shift
                hard = (middle & 1 == 1) & (middle >> 24 == 1) & (a >> 23 == 1)
                yield a[hard].astype(np.float32), b[hard].astype(np.float32)


@pytest.mark.parametrize(
    "name", [pytest.param(*NAMES[1].values, marks=[pytest.mark.slow, *NAMES[1].marks]), NAMES[2]]
)
def test_the_quotients_nearest_to_a_middle_are_rounded_once(name):
    tried = 0
    for pair in near_middles():
        number, scale = (np.pad(x, (0, -x.size % MANY), constant_values=1) for x in pair)
        found = divided(name, number, np.ones_like(number), scale)
        oracles.assert_same_bits(found, number / scale)
        tried += len(pair[0])
    assert tried > 10_000_000


@every
def test_float32_near_ties(stored, name):
    """Numbers around those whose quotient lies between two that can be stored."""
    rng = np.random.default_rng(0)
    largest = LARGEST[stored]
    amax = (2.0 ** rng.uniform(-86, 127, (64, 8, 1))).astype(np.float32)
    amax[::4] = np.nextafter(2 ** np.ceil(np.log2(amax[::4])), np.float32(0))  # all bits set
    ties = np.arange(0, 128) + 0.5 if stored == INT8 else 2.0**-10 * rng.integers(0, 99, 128)
    values = (rng.permuted(np.broadcast_to(ties, (64, 8, 128)), axis=-1) / largest * amax).astype(
        np.float32
    )
    values = np.clip(neighbours(rng, values, 2), -amax, amax)
    values[..., :1] = amax
    write_all(name, stored, values)


EDGES = {  # values, what amax they make, and what int8 stores of them
    "zeros": ([0.0, -0.0], 1e-26, [0, 0]),
    "subnormal": ([1e-39, -1e-45], 1e-26, [0, 0]),
    "just above the smallest": ([2e-26, -5e-27], 2e-26, [127, -32]),
    "below the smallest": ([4e-27], 1e-26, [51]),
    "one": ([1.0, -1.0, 0.5, 0.0], 1.0, [127, -127, 64, 0]),
    "ties": ([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5], 127.0, [127, 0, 2, 2, 0, -2, 126]),
    "the largest": ([FLOAT32.max, 1.0], FLOAT32.max, [127, 0]),
    "infinite": ([-np.inf, 1.0, FLOAT32.max], FLOAT32.max, [-127, 0, 127]),
    "no number": ([np.nan, 1.0, np.inf], np.nan, [0, 0, 0]),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_int8(edge, name):
    given, amax, wanted = EDGES[edge]
    values = np.resize(np.float32(given), (1, 2, 16))
    write_all(name, INT8, values)
    stored, scale = oracles.quantize_kv(values, INT8)
    np.testing.assert_array_equal(scale, np.full((1, 2, 1), np.float32(amax) / np.float32(127)))
    np.testing.assert_array_equal(stored.view(np.int8), np.resize(wanted, (1, 2, 16)))


@pytest.mark.parametrize("name", EXACTLY)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_of_fp8(edge, name):
    given, amax, _ = EDGES[edge]
    values = np.resize(np.float32(given), (1, 2, 16))
    write_all(name, FP8, values)
    stored, scale = oracles.quantize_kv(values, FP8)
    np.testing.assert_array_equal(scale, np.full((1, 2, 1), np.float32(amax) / np.float32(448)))
    assert np.isnan(stored.view(FP8).astype(np.float32)).all() == np.isnan(amax)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_is_of_its_head_alone(name):
    case = KvCase(INT8, 3, 4, 4, "float32", 2)
    k, v = np.ones((2, 2, 3, 4), np.float32)
    k[0, 1, 2] = np.nan
    planes = quantized.junk_planes(0, case)
    stored, scale, _, _ = write_by(name, case, planes, np.array([5, 6]), [k, v])
    is_nan = np.zeros((2, 3), bool)
    is_nan[0, 1] = True
    np.testing.assert_array_equal(np.isnan(scale[LAYER, 5:7, :, 0]), is_nan)
    np.testing.assert_array_equal(stored[LAYER, 5:7] == 0, np.repeat(is_nan[..., None], 4, -1))


@every
def test_what_is_read_is_near_what_was_given(stored, name):
    """Each element: half a step of int8; half a step of fp8, or of its subnormal numbers."""
    rng = np.random.default_rng(0)
    shape = (64, 3, 40)
    values = rng.standard_normal(shape) * 2.0 ** rng.uniform(-80, 80, (64, 3, 1))
    values = (values * 2.0 ** rng.uniform(-20, 0, shape)).astype(np.float32)
    case = KvCase(stored, 3, 40, 40, "float32", 64)
    slots = np.arange(FIRST_SLOT, FIRST_SLOT + 64)
    planes = write_by(name, case, quantized.junk_planes(0, case), slots, [values, -values])
    for i, given in ((0, values), (2, -values)):
        rows, scale = (plane[LAYER, slots].astype(np.float32) for plane in planes[i : i + 2])
        error = np.abs((rows * scale).astype(np.float64) - given)
        step = scale.astype(np.float64)
        half = step / 2 if stored == INT8 else np.maximum(np.abs(given) * 2.0**-4, step * 2.0**-10)
        # Quotient and product are rounded as well, at up to 127 scales.
        assert (error <= half * (1 + 2.0**-15)).all()
        assert (error > half / 2).any()  # and the bound is not loose


def times_the_inverse(values, dtype):
    """What XLA and torch make of a division by a number."""
    amax = np.clip(np.abs(values).max(-1, keepdims=True), np.float32(1e-26), FLOAT32.max)
    scale = amax * (np.float32(1) / LARGEST[dtype])
    return oracles.narrow(values / scale, dtype) if dtype == FP8 else _whole(values / scale), scale


def half_away_from_zero(values, dtype):
    _, scale = oracles.quantize_kv(values, dtype)
    quotients = values / scale
    return _whole(np.trunc(quotients + np.copysign(0.5, quotients))), scale


def nan_as_largest(values, dtype):
    _, scale = oracles.quantize_kv(values, dtype)
    return _whole(np.where(np.isnan(values / scale), 127, values / scale)), scale


def _whole(quotients):
    return np.nan_to_num(np.rint(quotients)).astype(np.int8)


@pytest.mark.parametrize(
    "wrong, stored, value",
    [
        (times_the_inverse, INT8, [13.0, 1.0]),
        (times_the_inverse, FP8, [3.0, 1.0]),
        (half_away_from_zero, INT8, [127.0, 0.5]),
        (nan_as_largest, INT8, [np.nan, 1.0]),
    ],
)
def test_a_wrong_implementation_is_caught(wrong, stored, value):
    """The comparison can fail: a product with the inverse, another rounding, another NaN."""
    case = KvCase(stored, 1, 2, 2, "float32", 1)
    values = [np.float32([[value]])] * 2
    planes = quantized.junk_planes(0, case)

    def by(quantize, case, planes, slots, values):
        rows = [part for given in values for part in quantize(given, stored)]
        planes = [plane.copy() for plane in planes]
        for plane, new in zip(planes, rows, strict=True):
            plane[LAYER, slots] = new.view(plane.dtype)
        return planes

    compare(partial(by, oracles.quantize_kv), case, planes, np.array([5]), values)
    with pytest.raises(AssertionError):
        compare(partial(by, wrong), case, planes, np.array([5]), values)
    with pytest.raises(AssertionError):
        compare(partial(by, oracles.quantize_kv), case, planes, np.array([-1]), values)


@pytest.mark.parametrize("left_behind", range(4))
def test_a_plane_left_behind_is_caught(left_behind):
    case = KvCase(INT8, 2, 4, 8, "float32", 1)

    def forgetful(case, planes, slots, values):
        found = write_by("reference", case, planes, slots, values)
        found[left_behind] = planes[left_behind]
        return found

    args = case, quantized.junk_planes(0, case), np.array([5]), quantized.exact_heads(0, case)
    with pytest.raises(AssertionError):
        compare(forgetful, *args)


@not_compiled
def test_rounding_twice_is_caught():
    """The interpreted kernel without the exact fma of these tests rounds some quotients wrong."""

    def twice(_, x, y, z):
        return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)

    with (
        mock.patch.object(interpreter.InterpreterBuilder, "create_fma", twice),
        pytest.raises(AssertionError),
    ):
        test_float32_near_ties(INT8, INTERPRETED)


def test_an_implementation_that_cannot_run_says_why():
    case = KvCase(INT8, 2, 4, 4, "float32", 1)
    planes = tensors(quantized.junk_planes(0, case), "reference")
    args = planes, 0, torch.tensor([4]), *torch.ones(2, 1, 2, 4)
    with pytest.raises(UnsupportedError, match=r"triton: needs .*CUDA device.* on cpu"):
        write_quantized_kv(*args, first_slot=4, implementation="triton")
    with pytest.raises(ValueError, match="no implementation 'cuda'; it has triton, reference"):
        write_quantized_kv(*args, first_slot=4, implementation="cuda")


ARGUMENTS = (
    "i, {stored}, f, {stored}, f, {source}, {source}, 1, n, n + 9, 4, 1024, 1024, "
    "8, 128, 128, 128, 16, 127.0, True"
)


@pytest.mark.parametrize("stored", ["torch.int8", "f8"])
def test_compiled_numbers_are_rounded_as_they_are_written(stored):
    """A program has 16 elements a thread: of each two products, two fused, and no division."""
    code = compiled.code("write_quantized_kv", ARGUMENTS.format(stored=stored, source="b"))
    assert code.count("fma.rn.f32") == 2 * 16
    assert code.count("mul.f32") == 2 * 16 + 1  # and one of the scale
    assert code.count("div.rn.f32") == 3  # the scale, its inverse, and the scale to be stored
    for word in ("div.full", "div.approx", "rcp", "ftz"):
        assert word not in code, word
    if stored == "f8":
        assert code.count("cvt.rn.satfinite.e4m3x2.f32") == 8
    else:
        assert code.count("0f4B400000") == code.count("add.f32") == 16


@pytest.mark.parametrize("stored", ["torch.int8", "f8"])
def test_compiled_reads_and_writes_are_wide(stored):
    code = compiled.code("write_quantized_kv", ARGUMENTS.format(stored=stored, source="b"))
    assert code.count("ld.global.v4.b32") >= 2
    assert code.count("st.global.v4.b32") >= 1
    assert "st.global.b8" not in code


@pytest.mark.parametrize("stored", ["torch.int8", "f8"])
def test_compiles_for_every_dtype_that_values_may_have(stored):
    constants = "3, 100, 28, 128, 4, 127.0, True"
    arguments = f"i, {stored}, f, {stored}, f, n, n, 1, 7, 16, 4, 300, 84, {constants}"
    assert compiled.times("write_quantized_kv", arguments, compiled.FLOATS) == 5
