"""The test infrastructure itself: required skips, GPU skips, kernels that fail."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py").read_text()
SKIPS = """
import pytest

@pytest.mark.skip(reason="moon: not up")
def test_marked(): ...

def test_called():
    pytest.skip("moon: not up")

def test_of_another_kind():
    pytest.skip("sun: not up")

@pytest.mark.xfail(reason="moon: known")
def test_expected_to_fail():
    assert False
"""


@pytest.fixture
def suite(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers = gpu")
    return pytester


@pytest.mark.parametrize(
    "options, outcomes",
    [
        ([], {"skipped": 3, "xfailed": 1}),
        (["--require=moon"], {"errors": 1, "failed": 1, "skipped": 1, "xfailed": 1}),
        (["--require=sun,moon"], {"errors": 1, "failed": 2, "xfailed": 1}),
    ],
)
def test_a_required_skip_is_a_failure(suite, options, outcomes):
    suite.makepyfile(SKIPS)
    suite.runpytest_inprocess(*options).assert_outcomes(**outcomes)


def test_a_required_skip_of_a_whole_module_is_an_error(suite):
    suite.makepyfile("import pytest\npytest.importorskip('no_such', reason='moon: not up')")
    suite.runpytest_inprocess().assert_outcomes(skipped=1)
    suite.runpytest_inprocess("--require=moon").assert_outcomes(errors=1)


def test_a_gpu_test_runs_or_names_its_reason(suite):
    suite.makepyfile("import pytest, jax\n@pytest.mark.gpu\ndef test_it(): jax.devices('cuda')")
    # In a process of its own, because pytester forgets what was imported and JAX loads only once.
    result = suite.runpytest_subprocess("-rs")
    if result.parseoutcomes().get("skipped"):
        result.stdout.fnmatch_lines(["SKIPPED*gpu: JAX sees no CUDA device*"])
        suite.runpytest_subprocess("--require=gpu").assert_outcomes(errors=1)
    else:
        result.assert_outcomes(passed=1)
