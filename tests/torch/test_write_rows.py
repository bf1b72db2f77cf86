"""write_rows of kvtorch against a loop over tokens."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")
# ruff: noqa: E402

from kvjax.errors import UnsupportedError
from kvtorch.ops.write_rows import write_rows
from tests import oracles
from tests.cases import KV, Case
from tests.strategies import inputs, planes, random_rows, rows, slots
from tests.torch.implementations import (
    FEW,
    FOR_GPU,
    FP8,
    NAMES,
    ODD,
    REFERENCE,
    REFERENCE_ON_GPU,
    call,
    device_of,
    for_examples,
    layers,
    of_any_width,
    on_cases,
    tensors,
)
from tests.torch.tensors import LAYOUTS, to_numpy, to_torch, whole


def write(name, case, planes, layer, slots, rows, *, layout=whole, scales=None):
    """What becomes of the planes; everything else keeps its bits, also around strided rows."""
    old, (indices,) = tensors(planes, name), tensors([slots], name)
    new = [
        layout(tensor, len(shape))
        for tensor, (shape, _) in zip(tensors(rows, name), case.rows, strict=True)
    ]
    base = [tensor._base if tensor._base is not None else tensor for tensor in new]
    before = [to_numpy(tensor) for tensor in base]
    result = call(
        *("write_rows", name, old, layer, indices, new),
        constants=case.constants,
        first_slot=case.first_slot,
        scales=scales,
    )
    assert result is None
    for tensor, expected in zip([indices, *base], [slots, *before], strict=True):
        oracles.assert_same_bits(to_numpy(tensor), expected)
    return [to_numpy(tensor) for tensor in old]


def compare(write, case, planes, layer, slots, rows):
    written = write(case, planes, layer, slots, rows)
    for actual, plane, new in zip(written, planes, rows, strict=True):
        expected = oracles.write_rows(plane, layer, slots, new, case.first_slot)
        oracles.assert_same_bits(actual, expected)


any_width = partial(of_any_width, slots)


@on_cases(reference=REFERENCE, interpreted=FEW, gpu=FOR_GPU, reference_on_gpu=REFERENCE_ON_GPU)
def test_equals_oracle(name, case):
    check = partial(compare, partial(write, name), case)
    for_examples(name, inputs(case, planes, layers, any_width, rows), check)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_cases(
    reference=[Case(FP8, 7), Case(KV, 7, None), Case(ODD[0], 1)],
    interpreted=[Case(KV, 7, 1), Case(KV, 3, None), Case(ODD[0], 1, 1)],
    gpu=[Case(KV, 61, None)],
)
def test_rows_of_any_strides(name, case, layout):
    def check(planes, layer, slots, rows):
        compare(partial(write, name, layout=layout), case, planes, layer, slots, rows)

    for_examples(name, inputs(case, planes, layers, slots, rows), check)


@pytest.mark.parametrize("name", NAMES)
def test_one_row_for_all_tokens(name):
    case = Case(KV, 7, 1)
    old, new = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 1)

    def expanded(tensor, _):
        return tensor[:1].expand(case.num_tokens, *tensor.shape[1:])

    repeated = [np.repeat(row, case.num_tokens, 0) for row in new]
    slots = np.arange(5, 5 + case.num_tokens)
    compare(partial(write, name, layout=expanded), case, old, 1, slots, repeated)


@pytest.mark.parametrize("name", NAMES)
def test_slots_of_any_stride(name):
    """As engines cut the first slot of each page out of many, or repeat one."""
    case = Case(KV, 3)
    old, new = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 3)
    expected = [
        oracles.write_rows(plane, 1, [5, 4, 9], rows, case.first_slot)
        for plane, rows in zip(old, new, strict=True)
    ]
    planes = tensors(old, name)
    slots = torch.tensor([5, 6, 4, 7, 9, 8], device=device_of(name))[::2]
    call("write_rows", name, planes, 1, slots, tensors(new, name), first_slot=case.first_slot)
    for plane, wanted in zip(planes, expected, strict=True):
        oracles.assert_same_bits(to_numpy(plane), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_differ_in_how_rows_lie_do_not_share_what_was_compiled(name):
    """What a kernel assumes of an address or a stride must not be true of the last call only."""
    case = Case((((1, 16), "bfloat16"),), 1, 1)
    old, new = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 1)
    for num_tokens in (1, 5, 1):
        for layout in (*LAYOUTS, *LAYOUTS[::-1]):
            slots = np.arange(4, 4 + num_tokens)
            rows = [np.repeat(row, num_tokens, 0) for row in new]
            compare(partial(write, name, layout=layout), case, old, 1, slots, rows)


def test_a_wrong_implementation_is_caught():
    """The comparison above can fail: the obvious one-liner writes the last row for slot -1."""

    def one_liner(case, planes, layer, slots, rows):
        old = tensors(planes, "reference")
        for plane, new in zip(old, tensors(rows, "reference"), strict=True):
            plane[layer, torch.from_numpy(slots)] = new
        return [to_numpy(plane) for plane in old]

    case = Case(KV, 1)
    old, new = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 1)
    compare(one_liner, case, old, 1, np.array([5]), new)
    with pytest.raises(AssertionError):
        compare(one_liner, case, old, 1, np.array([-1]), new)


@pytest.mark.parametrize("name", NAMES)
def test_a_mha_14_values_of_the_dtype_ignore_the_scale(name):
    """And each plane is looked at by itself (A-MHA-14c)."""
    case = Case(FP8, 7, 1)
    old, rows = random_rows(0, case.rows, 2, case.num_rows), random_rows(1, case.rows, 7)
    rows = rows[0], np.nan_to_num(rows[1].astype(np.float32)) * 2
    scale = torch.tensor(2.0, device=device_of(name))
    for scales in ((3.0, 2.0), (scale, scale), (None, scale)):
        written = write(name, case, old, 1, np.arange(5, 12), rows, scales=scales)
        halves = rows[0], oracles.narrow(rows[1], ml_dtypes.float8_e5m2, 2.0)
        for actual, plane, new in zip(written, old, halves, strict=True):
            expected = oracles.write_rows(plane, 1, np.arange(5, 12), new, case.first_slot)
            oracles.assert_same_bits(actual, expected)


@pytest.mark.gpu
def test_more_than_a_million_tokens_and_more_elements_than_int32_has():
    """2.7 GB, of which the last layer's rows are past 2**31 elements."""
    num_tokens, first_slot, width = (1 << 20) + 7, 16, 576
    num_rows = 2_340_000
    plane = torch.full((2, num_rows, 1, width), 0x5A, dtype=torch.uint8, device="cuda")
    assert plane.numel() > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    slots = torch.randperm(num_rows, generator=generator, device="cuda")[:num_tokens]
    slots[slots == num_rows - 1] = 0
    slots[5] = num_rows - 1
    rows = torch.randint(
        *(0, 256, (num_tokens, 1, width)), dtype=torch.uint8, generator=generator, device="cuda"
    )
    typed, new = (tensor.view(torch.float8_e4m3fn) for tensor in (plane, rows))
    write_rows([typed], 1, slots, [new], first_slot=first_slot, implementation="triton")
    there = slots >= first_slot
    assert torch.equal(plane[1, slots[there]], rows[there])
    plane[1, slots[there]] = 0x5A
    assert bool((plane == 0x5A).all())


def test_an_implementation_that_cannot_run_says_why():
    plane, slots = torch.zeros(1, 9, 4), torch.tensor([4])
    rows = torch.zeros(1, 4)
    with pytest.raises(UnsupportedError, match=r"triton: needs .*CUDA device.* on cpu"):
        write_rows([plane], 0, slots, [rows], first_slot=4, implementation="triton")
    wide = torch.zeros(1, 9, 65537)
    with pytest.raises(UnsupportedError, match="triton: takes rows of up to 65536 elements"):
        write_rows(
            *([wide], 0, slots, [torch.zeros(1, 65537)]), first_slot=4, implementation="triton"
        )
    with pytest.raises(ValueError, match="no implementation 'cuda'; it has triton, reference"):
        write_rows([plane], 0, slots, [rows], first_slot=4, implementation="cuda")
    assert not plane.any()


def test_the_fastest_that_can_run_is_chosen():
    """On a CPU that is the reference."""
    plane = to_torch(np.zeros((1, 9, 4), np.float32))
    write_rows([plane], 0, torch.tensor([4]), [torch.ones(1, 4)], first_slot=4)
    assert plane[0, 4].eq(1).all() and plane.sum() == 4
