"""The kernels of operations compile for an H200, and sizes make no difference."""

import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")

from tests.torch.compiled import times  # noqa: E402

# Arguments of the kernel, with a size n of tokens, rows or layers; tensors are their dtypes.
KERNELS = [
    pytest.param(
        "write_rows",
        "i, b, b, b, b, 3, n, 7 * n, 16, 0, 1024, 1.0, 0, 1024, 1.0, "
        "0, 0, 1024, 1024, 1024, 2, True",
        id="write_rows",
    ),
    pytest.param(
        "write_rows",
        "torch.int32, f8, b, b, f, 3, n, 7 * n, 16, 0, 128, 0.5, 0, 48, f, "
        "1, 2, 128, 48, 128, 8, True",
        id="write_rows, narrowing",
    ),
    pytest.param(
        "write_latent_rope",
        "i, f8, b, f, 3, n, 7 * n, 16, 512, 64, 512, 64, 512, 64, 4, True",
        id="write_latent_rope",
    ),
    pytest.param(
        "read_latent_rope",
        "i, torch.float8_e5m2, b, b, 3, n, 7 * n, 16, 512, 64, 512, 64, 4, True",
        id="read_latent_rope",
    ),
    pytest.param(
        "move_rows",
        "i, torch.int32, b, f, n, 7 * n, 16, n, 1024, 512, 256, 128, 4, 64, True, True",
        id="move_rows, held",
    ),
    pytest.param(
        "move_rows",
        "i, i, b, b, n, 7 * n, 16, n, 1024, 1024, 1024, 1024, 1, 4, False, True",
        id="move_rows, disjoint",
    ),
    *(
        pytest.param(
            "write_quantized_kv",
            f"i, {stored}, f, {stored}, f, b, f, 3, n, 7 * n, 16, 1024, 384, "
            "8, 128, 48, 128, 16, 127.0, True",
            id=f"write_quantized_kv, {stored}",
        )
        for stored in ("torch.int8", "f8")
    ),
    *(
        pytest.param(
            "read_quantized_kv",
            f"i, {stored}, f, {stored}, f, b, b, 3, n, 7 * n, 16, 3, 128, 128, 128, 4, True",
            id=f"read_quantized_kv, {stored}",
        )
        for stored in ("torch.int8", "f8")
    ),
    *(
        pytest.param(
            "staged_move",
            f"i, i, torch.bool, b, b, f, f, n, 7 * n, 16, n, n, 1024, 512, 1024, 4, {step}, True",
            id=f"staged_move, step {step}",
        )
        for step in (0, 1)
    ),
]


@pytest.mark.parametrize("operation, arguments", KERNELS)
def test_compiles_once_for_all_sizes(operation, arguments):
    assert times(operation, arguments, [1, 5, 16, 2**20 + 3]) == 1


def test_a_size_that_is_compiled_in_is_caught():
    arguments = "i, b, b, b, 3, n, 7 * n, 16, 512, 64, 512, 64, 512, 64, n, True"
    assert times("write_latent_rope", arguments, [2, 4]) == 2
