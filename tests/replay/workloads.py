"""Pools of several kinds, and requests that use all that a replay does."""

import dataclasses

import numpy as np

from kvjax.geometry import LayerRange, MHAGeometry, MLAGeometry
from kvjax.replay.jobs import Job
from kvjax.replay.scheduler import Settings

ENGINE = Settings(
    num_pages=20,
    page_size=4,
    unit_len=8,
    host_units=6,
    concurrency=3,
    step_ms=10,
    compact_every=7,
)
SIZES = {"num_slots": 80, "page_size": 4, "layers": LayerRange(3, 6)}
HEADS = {"num_kv_heads": 2, "head_dim": 8}
LATENT = {"latent_dim": 16, "rope_dim": 4}
GEOMETRIES = {
    "mha-bfloat16-float8_e4m3fn": MHAGeometry(
        **SIZES, **HEADS, dtype="bfloat16", v_dtype="float8_e4m3fn", v_head_dim=6
    ),
    "mha-float32": MHAGeometry(**SIZES, **HEADS, dtype="float32"),
    "mha-float8_e5m2": MHAGeometry(**SIZES, **HEADS, dtype="float8_e5m2"),
    "mla-bfloat16": MLAGeometry(**SIZES, **LATENT, dtype="bfloat16"),
    "mla-float16": MLAGeometry(**SIZES, **LATENT, dtype="float16"),
}
QUANTIZED = {
    f"mla-quantized-{dtype}": MLAGeometry(
        **SIZES, **LATENT, dtype=dtype, quantization="per_token_head"
    )
    for dtype in ("bfloat16", "float32")
} | {
    "mha-int8": MHAGeometry(
        **SIZES, **HEADS, dtype="float16", v_head_dim=6, quantization="int8_per_token_head"
    ),
    "mha-fp8": MHAGeometry(**SIZES, **HEADS, dtype="bfloat16", quantization="fp8_per_token_head"),
}

# Rows of real models, which the kernels take.
WIDE = {
    "mha": MHAGeometry(**SIZES, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
    "mha-float8": MHAGeometry(**SIZES, num_kv_heads=8, head_dim=128, dtype="float8_e4m3fn"),
    "mla": MLAGeometry(**SIZES, latent_dim=512, rope_dim=64, dtype="bfloat16"),
}
WIDE_QUANTIZED = {
    "mla-quantized": dataclasses.replace(WIDE["mla"], quantization="per_token_head"),
    "mha-int8": dataclasses.replace(WIDE["mha"], quantization="int8_per_token_head"),
    "mha-fp8": dataclasses.replace(WIDE["mha"], quantization="fp8_per_token_head"),
}


def make_jobs(count):
    """Conversations over a small tree of prefixes, too many for either tier."""
    random = np.random.default_rng(1)
    jobs = []
    for number in range(count):
        steps = random.integers(0, 2, random.integers(0, 5))
        units = tuple(int("1" + "".join(map(str, steps[: i + 1]))) for i in range(len(steps)))
        tail, output_len = random.integers(1, 8), random.integers(1, 12)
        jobs.append(Job(number, number * 12, len(units) * 8 + int(tail), int(output_len), units))
    return jobs
