"""The implementations of an operation, as a parameter of tests, and how each is run."""

import contextlib
import dataclasses
import functools
import importlib
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from jax.experimental.pallas import mosaic_gpu as plgpu

INTERPRETED = "mosaic_gpu-interpreted"
SETTINGS = {
    "reference": settings(max_examples=25),
    # 10 ms a row, or more. Shrinking what fails would take minutes.
    INTERPRETED: settings(max_examples=6, phases=[Phase.reuse, Phase.generate]),
    "mosaic_gpu": settings(max_examples=40),
}


def on_cases(*, reference=(), interpreted=(), slow=(), gpu=()):
    """Parameters ``name, case``: each implementation with cases of its own.

    ``slow`` are cases of the interpreted kernel that take several seconds.
    """
    table = [
        ("reference", reference, ()),
        (INTERPRETED, interpreted, ()),
        (INTERPRETED, slow, pytest.mark.slow),
        ("mosaic_gpu", gpu, pytest.mark.gpu),
    ]
    return pytest.mark.parametrize(
        "name, case",
        [
            pytest.param(name, case, marks=marks, id=f"{name}-{case}")
            for name, cases, marks in table
            for case in dict.fromkeys(cases)
        ],
    )


def for_examples(name, strategy, check):
    """Calls ``check`` with what ``strategy`` draws, as often as the implementation is fast."""

    @SETTINGS[name]
    @given(strategy)
    def draw_and_check(drawn):
        check(*drawn)

    draw_and_check()


def run(operation, name, case, *args, detect_races=True, **options):
    """What the named implementation of ``kvjax.ops.<operation>`` makes of the arguments.

    Arrays are traced, Python's numbers and strings are not. Compiled once for each shape.
    """
    args, options = [_fix(arg) for arg in args], {key: _fix(arg) for key, arg in options.items()}
    result = _compiled(operation, name, case.constants, detect_races)(*args, **options)
    result = jax.tree.map(np.asarray, result)
    if detect_races and _found_races():
        raise RuntimeError("RACE DETECTED")  # as JAX 0.12 does itself
    return result


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Fixed:
    """A number or a name known when compiling."""

    value: int | bool | str


def _fix(arg):
    return _Fixed(arg) if isinstance(arg, int | str) else arg


def _unfix(arg):
    return arg.value if isinstance(arg, _Fixed) else arg


@functools.cache
def _compiled(operation, name, constants, detect_races):
    module = importlib.import_module(f"kvjax.ops.{operation}")

    @jax.jit
    def function(*args, **options):
        args, options = [_unfix(arg) for arg in args], {k: _unfix(v) for k, v in options.items()}
        with contextlib.ExitStack() as stack:
            for constant, value in constants:
                stack.enter_context(mock.patch(f"kvjax.ops.{constant}", value))
            if name != INTERPRETED:
                return getattr(module, operation)(*args, implementation=name, **options)
            params = plgpu.InterpretGPUParams(detect_races=detect_races)
            stack.enter_context(plgpu.force_gpu_interpret_mode(params))
            stack.enter_context(mock.patch("kvjax.ops.quantizing.fused", _rounded_once))
            return module._mosaic_gpu(*args, **options)

    return function


def _rounded_once(a, b, c):
    """As a GPU computes what kernels say, and what interprets them does not."""
    with jax.enable_x64(True):
        return (a.astype("float64") * b.astype("float64") + c.astype("float64")).astype("float32")


def _found_races():
    """Whether two accesses of the last interpreted kernel were not ordered by anything.

    Source: JAX 0.11 ``InterpretGPUParams.detect_races``, whose answer is not exported.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks._races is not None and gpu_callbacks._races.races_found
