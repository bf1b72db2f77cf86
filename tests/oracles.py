"""What operations on planes should do, one row at a time, and when two arrays are the same.

Arrays are NumPy's, of any dtype. Rows are copied and not computed with, so every bit survives, but
for ``narrow``, ``quantize`` and ``dequantize``.
"""

import ml_dtypes
import numpy as np


def is_there(plane, layer, slot, first_slot):
    num_layers, num_rows = plane.shape[:2]
    return 0 <= layer < num_layers and first_slot <= slot < num_rows


def write_rows(plane, layer, slots, rows, first_slot):
    out = plane.copy()
    for of_layer, new in enumerate(rows) if layer is None else [(layer, rows)]:
        for slot, row in zip(slots, new, strict=True):
            if is_there(plane, of_layer, slot, first_slot):
                out[of_layer, slot] = row
    return out


def write_repeated_rows(plane, layer, slots, rows, first_slot, written):
    """``write_rows`` where of several rows for one slot that one counts which was ``written``."""
    out = write_rows(plane, layer, slots, rows, first_slot)
    for slot, row in zip(slots, rows, strict=True):
        if is_there(plane, layer, slot, first_slot) and same_bits(written[layer, slot], row):
            out[layer, slot] = row
    return out


def read_rows(plane, layer, slots, first_slot):
    if layer is None:
        return np.stack([read_rows(plane, each, slots, first_slot) for each in range(len(plane))])
    out = np.zeros((len(slots), *plane.shape[2:]), plane.dtype)
    for t, slot in enumerate(slots):
        if is_there(plane, layer, slot, first_slot):
            out[t] = plane[layer, slot]
    return out


def copy_rows(
    target,
    target_layer,
    target_slots,
    target_first,
    source,
    source_layer,
    source_slots,
    source_first,
):
    rows = read_rows(source, source_layer, source_slots, source_first)
    return write_rows(target, target_layer, target_slots, rows, target_first)


def move_rows(plane, dst, src, first_slot):
    return copy_rows(plane, None, dst, first_slot, plane, None, src, first_slot)


def zero_rows(plane, slots, first_slot):
    nothing = np.zeros((len(plane), len(slots), *plane.shape[2:]), plane.dtype)
    return write_rows(plane, None, slots, nothing, first_slot)


def slots_of(pages, page_size):
    return [int(page) * page_size + i for page in pages for i in range(page_size)]


def narrow(values, dtype, scale=None):
    if values.dtype == dtype:
        return values
    with np.errstate(all="ignore"):
        if scale is not None:
            values = values.astype(np.float32) / np.asarray(scale, np.float32)
        if np.dtype(dtype).itemsize == 1:
            limit = np.float32(ml_dtypes.finfo(dtype).max)
            values = np.clip(values.astype(np.float32), -limit, limit)  # NaN stays NaN
        return values.astype(dtype)


SMALLEST_AMAX = np.float32(1e-26)


def quantize(latent, rope, dtype):
    """The bits of the latent in e4m3fn, a scale for each row, and the rope in ``dtype``.

    ``latent`` is ``[n, 1, latent_dim]`` and ``rope`` ``[n, 1, rope_dim]``, each of any dtype that
    float32 holds.
    """
    latent, rope = latent.astype(np.float32), rope.astype(np.float32)
    amax = np.abs(latent).max(axis=-1, keepdims=True)  # NaN where there is one
    amax = np.clip(amax, SMALLEST_AMAX, np.finfo(np.float32).max)
    with np.errstate(all="ignore"):
        scale = amax / np.float32(ml_dtypes.finfo("float8_e4m3fn").max)
        limit = np.float32(ml_dtypes.finfo(dtype).max)
        rope = np.clip(rope / scale, -limit, limit).astype(dtype)
    return narrow(latent, "float8_e4m3fn", scale).view(np.uint8), scale, rope


def dequantize(latent, scale, rope, dtype):
    """Latent and rope in ``dtype``, of what ``quantize`` returns."""
    latent = latent.view("float8_e4m3fn")
    with np.errstate(all="ignore"):
        parts = [part.astype(np.float32) * scale for part in (latent, rope)]
    return tuple(narrow(part, dtype) for part in parts)


def quantize_kv(values, dtype):
    """The bits of K or V, ``[n, heads, dim]``, in int8 or e4m3fn, and a scale for each head."""
    values = values.astype(np.float32)
    amax = np.abs(values).max(axis=-1, keepdims=True)  # NaN where there is one
    amax = np.clip(amax, SMALLEST_AMAX, np.finfo(np.float32).max)
    largest = np.float32(127 if dtype == "int8" else ml_dtypes.finfo(dtype).max)
    scale = amax / largest
    if dtype != "int8":
        return narrow(values, dtype, scale).view(np.uint8), scale
    with np.errstate(all="ignore"):
        quotients = np.clip(np.rint(values / scale), -largest, largest)  # ties to even
    return np.where(np.isnan(quotients), 0, quotients).astype(np.int8).view(np.uint8), scale


def dequantize_kv(stored, scale, stored_dtype, dtype):
    """K or V in ``dtype``, of what ``quantize_kv`` returns."""
    with np.errstate(all="ignore"):
        return narrow(stored.view(stored_dtype).astype(np.float32) * scale, dtype)


def meets_subnormals(values, scale):
    """Where a division has to do with float32's subnormals, which XLA on CPU takes for zeros."""
    smallest = np.finfo(np.float32).smallest_normal
    values = np.abs(values.astype(np.float32))
    with np.errstate(all="ignore"):
        quotients = values / np.abs(scale)
    return ((values > 0) & (values < smallest)) | ((quotients > 0) & (quotients < smallest))


def bits(array):
    """The bit patterns of the numbers, so that NaNs compare and -0.0 differs from 0.0."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def same_bits(a, b):
    return np.array_equal(bits(a), bits(b))


def assert_same_bits(actual, expected):
    actual = np.asarray(actual)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(bits(actual), bits(expected))


def assert_same_numbers(actual, expected, may_be_zero=False):
    """Bit for bit, but for what a NaN carries; zeros too where they are said to do."""
    actual = np.asarray(actual)
    assert (np.isnan(actual) == np.isnan(expected)).all()
    zeros = may_be_zero & (actual == 0) & (np.signbit(actual) == np.signbit(expected))
    assert_same_bits(np.where(np.isnan(expected) | zeros, expected, actual), expected)
