"""The implementations of kvtorch's operations, as a parameter of tests, and what they are given."""

import contextlib
import importlib
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from triton import knobs

from kvjax.dispatch import Implementation
from tests import cases
from tests.cases import TRACED, Case, latent
from tests.strategies import INT32, seeds
from tests.torch.tensors import to_torch

INTERPRETED = "triton-interpreted"
ON_GPU = "reference-gpu"
NO_SHRINKING = [Phase.reuse, Phase.generate]
SETTINGS = {
    "reference": settings(max_examples=20),
    # 1 ms a program, or more. Shrinking what fails would take minutes, also where all is compiled.
    INTERPRETED: settings(max_examples=5, phases=NO_SHRINKING),
    "triton": settings(max_examples=30, phases=NO_SHRINKING),
    ON_GPU: settings(max_examples=10),
}

KV, BYTES, LONG, ODD = cases.KV, cases.BYTES, cases.LONG, cases.ODD
THREE = (((1, 8), "float16"), ((3, 4), "float32"), ((1, 16), "float8_e5m2"))
FP8 = (((2, 24), "float8_e4m3fn"), ((1, 16), "float8_e5m2"))
SMALL_TILES = (("launch.FEW_TOKENS", 0), ("write_rows.TILE", 64), ("move_rows.TILE", 64))
SEVERAL_A_PROGRAM = (("launch.FEW_TOKENS", 0),)
REFERENCE = [
    *(Case(KV, num_tokens) for num_tokens in (0, 1, 7, 64)),
    *(Case(KV, 7, layer) for layer in (None, 0)),
    *(Case(rows, 7) for rows in (BYTES, FP8, THREE, LONG, *ODD)),
    *(Case(rows, 13, None) for rows in (FP8, ODD[0])),
]
FEW = [  # for Triton's interpreter
    *(Case(KV, num_tokens) for num_tokens in (0, 1, 13)),
    Case(KV, 7, None),
    Case(KV, 13, None, SMALL_TILES),
    *(Case(rows, 7) for rows in (FP8, THREE)),
    *(Case(rows, 7, 1) for rows in (BYTES, LONG, *ODD)),
]
FOR_GPU = [  # few, because each takes most of a second to compile
    *(Case(KV, num_tokens) for num_tokens in (0, 1, 61)),
    Case(KV, 2053, None),
    *(Case(rows, 1291) for rows in (FP8, THREE)),
    Case(LONG, 33, None),
    Case(ODD[0], 127),
]
REFERENCE_ON_GPU = [Case(KV, 61), Case(FP8, 13, None)]

REFERENCE_LATENT = [
    *(latent(64, 32, "float32", num_tokens) for num_tokens in (0, 1, 7)),
    latent(512, 64, "bfloat16", 7),
    latent(528, 128, "uint8", 7),
    latent(100, 28, "float8_e4m3fn", 13),
    latent(16, 0, "float32", 7),
    latent(0, 16, "float32", 7),
    latent(5, 3, "float16", 7, 0),
    latent(1, 1, "float8_e5m2", 7),
]
FEW_LATENT = [
    *(latent(64, 32, "float32", num_tokens) for num_tokens in (0, 1, 13)),
    latent(64, 32, "float32", 13, TRACED, SEVERAL_A_PROGRAM),
    latent(528, 128, "uint8", 3),
    latent(100, 28, "float8_e4m3fn", 7),
    latent(16, 0, "float32", 3),
    latent(0, 16, "float32", 3),
    latent(5, 3, "float16", 61),
]
LATENT_FOR_GPU = [
    *(latent(512, 64, "bfloat16", num_tokens) for num_tokens in (0, 1, 61)),
    latent(528, 128, "uint8", 31),
    latent(512, 64, "float8_e4m3fn", 2053),
    latent(16, 0, "float32", 7),
    latent(5, 3, "float16", 1291),
]


def on_cases(*, reference=(), interpreted=(), gpu=(), reference_on_gpu=()):
    """Parameters ``name, case``: each implementation with cases of its own."""
    table = [
        ("reference", reference, ()),
        (INTERPRETED, interpreted, not_compiled),
        ("triton", gpu, pytest.mark.gpu),
        (ON_GPU, reference_on_gpu, pytest.mark.gpu),
    ]
    return pytest.mark.parametrize(
        "name, case",
        [
            pytest.param(name, case, marks=marks, id=f"{name}-{case}")
            for name, cases, marks in table
            for case in cases
        ],
    )


not_compiled = pytest.mark.skipif(
    not knobs.runtime.interpret, reason="interpreter: Triton compiles, TRITON_INTERPRET=0"
)
"""Mark of tests of interpreted kernels: where there is a GPU, the compiled ones are tested."""

NAMES = [
    "reference",
    pytest.param(INTERPRETED, marks=not_compiled),
    pytest.param("triton", marks=pytest.mark.gpu),
]


def device_of(name):
    return "cuda" if name in ("triton", ON_GPU) else "cpu"


def for_examples(name, strategy, check):
    """Calls ``check`` with what ``strategy`` draws, as often as the implementation is fast."""

    @SETTINGS[name]
    @given(strategy)
    def draw_and_check(drawn):
        check(*drawn)

    draw_and_check()


def call(operation, name, *args, constants=(), **options):
    """Calls ``kvtorch.ops.<operation>`` with tensors, by the named implementation.

    Triton's interpreter also takes tensors on the CPU, which the operation itself refuses.

    Args:
      operation: also the module's name.
      name: of the implementation.
      args, options: the operation's own.
      constants: of modules of ``kvtorch.ops``, replaced for the call: ``(("move_rows.TILE", 1),)``.
    """
    module = importlib.import_module(f"kvtorch.ops.{operation}")
    with contextlib.ExitStack() as stack:
        for constant, value in constants:
            stack.enter_context(mock.patch(f"kvtorch.ops.{constant}", value))
            stack.enter_context(_nothing_remembered(module))
        if name == INTERPRETED:
            anywhere = Implementation(module._triton, lambda *_: None)
            stack.enter_context(mock.patch.dict(module.IMPLEMENTATIONS, triton=anywhere))
        implementation = {INTERPRETED: "triton", ON_GPU: "reference"}.get(name, name)
        return getattr(module, operation)(*args, implementation=implementation, **options)


@contextlib.contextmanager
def _nothing_remembered(module):
    """What a module derived from other constants, or derives from these, is derived anew."""
    caches = [x for x in vars(module).values() if hasattr(x, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def layers(case):
    if case.layer != TRACED:
        return st.just(case.layer)
    return st.integers(0, case.num_layers - 1)


FAR = [2**31, 2**32, 2**40 + 7, -(2**31) - 1, -(2**32), 2**63 - 1, -(2**63)]


@st.composite
def of_any_width(draw, strategy, case):
    """One array of slots or several, as int32, or as int64 with some that are no int32.

    Some of those would be there if they were cut to int32.
    """
    drawn = draw(strategy(case))
    if draw(st.booleans()):
        return drawn
    rng = np.random.default_rng(draw(seeds))
    wide = [_with_far_slots(rng, case, slots) for slots in np.atleast_2d(drawn)]
    return tuple(wide) if isinstance(drawn, tuple) else wide[0]


def _with_far_slots(rng, case, slots):
    assert ((slots >= INT32.min) & (slots <= INT32.max)).all()
    there = np.arange(case.first_slot, case.num_rows)
    aliases = rng.choice(there, slots.size) + rng.choice([-(2**32), 2**32, 2**35], slots.size)
    far = np.where(rng.random(slots.size) < 0.5, rng.choice(FAR, slots.size), aliases)
    is_absent = (slots < case.first_slot) | (slots >= case.num_rows)
    return np.where(is_absent & (rng.random(slots.size) < 0.5), far, slots.astype(np.int64))


def tensors(arrays, name):
    return [to_torch(array, device_of(name)) for array in arrays]
