"""What every test gets: hypothesis profiles, type checks on kvjax.ops, skips that can be refused.

A skip's reason starts with what is missing and a colon, as in ``gpu: JAX sees no CUDA device``;
``--require=gpu,torch`` turns skips for these reasons into failures.
"""

import functools
import os
import pathlib
import sys

import hypothesis
import jaxtyping
import pytest

# Before anything imports Triton: without a GPU its kernels run in its interpreter.
if not any(path.exists() for path in map(pathlib.Path, ("/dev/nvidiactl", "/dev/dxg"))):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Before anything imports kvjax.ops. Only there: the hook would check the fields of registered
# dataclasses too, which JAX rebuilds with tracers, shapes and None.
jaxtyping.install_import_hook("kvjax.ops", "beartype.beartype")

# An example that compiles a kernel takes seconds, so none has a deadline.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if "CI" in os.environ else "dev")


def pytest_addoption(parser):
    parser.addoption(
        "--require",
        default="",
        metavar="THING,...",
        help="fail instead of skipping for these reasons, such as gpu or torch",
    )


@functools.cache
def _why_no_gpu() -> str | None:
    import jax

    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"gpu: JAX sees no CUDA device ({error})"
    return None


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _fresh_kernel_interpreter():
    """Keeps one test's failed interpreted kernel from failing the next one's.

    Source: JAX 0.11 ``InterpretGPUParams``, which asks for this call but does not export it.
    """
    yield
    if "jax.experimental.pallas.mosaic_gpu" in sys.modules:
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

        interpret_pallas_call.reset_gpu_interpret_mode_state()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return _refuse_required_skip(item.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _refuse_required_skip(collector.config, (yield))


def _refuse_required_skip(config, report):
    if report.skipped and not hasattr(report, "wasxfail"):
        _, _, reason = report.longrepr
        missing = reason.removeprefix("Skipped: ").partition(":")[0]
        if missing in config.getoption("require").split(","):
            report.outcome = "failed"
            report.longrepr = f"--require={missing}, but: {reason}"
    return report
