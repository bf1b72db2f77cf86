"""What Triton makes of a kernel, and how often, for an H200, which need not be there."""

import os
import subprocess
import sys

PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Hopper())
from kvtorch.ops import {operation} as operation
_kernel, BLOCK = operation._kernel, getattr(operation, "BLOCK", None)
i, f, b, f8 = torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn
for n in {sizes}:
    compiled = _kernel.warmup({arguments}, grid=(1,))
print({result})
"""

FLOATS = "[f, b, f8, torch.float16, torch.float8_e5m2]"
"""Every dtype that values may have, in place of sizes."""


def times(operation, arguments, sizes):
    """Compilations of the operation's kernel with these arguments, for ``n`` of every size."""
    return int(_run(operation, arguments, sizes, "len(_kernel.device_caches[0][0])"))


def code(operation, arguments):
    """The kernel with these arguments, for an ``n`` of 7, in PTX."""
    return _run(operation, arguments, [7], "compiled.asm['ptx']")


def _run(operation, arguments, sizes, result):
    program = PROGRAM.format(operation=operation, arguments=arguments, sizes=sizes, result=result)
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert not found.returncode, found.stderr
    return found.stdout
