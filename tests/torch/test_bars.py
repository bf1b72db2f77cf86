"""What kvtorch has promised of a benchmark: figures that keep it, and figures that do not."""

import pytest

pytest.importorskip("torch", reason="torch: not installed")

from benchmarks import bars
from benchmarks.report import Figure


def figure(case, name, num_tokens, device=1e-6, host=1e-6, share=0.5):
    return Figure(case, num_tokens, name, device, host, 1000, 1000 / device / share)


def test_bars_pass_and_fail():
    by_promise = {
        bar.promise: bar.passed
        for bar in bars.bars(
            [
                figure(bars.DISJOINT, "triton", 16, device=4.1e-6),
                figure(bars.DISJOINT, "triton", 256, share=0.81),
                figure(bars.DISJOINT, "triton", 1024, share=0.84),
                figure(bars.OVERLAPPING, "triton", 256, device=1.6e-6),
                figure(bars.PERMUTED, "triton", 256, device=2.6e-6),
                figure(bars.WRITE_LATENT, "triton", 16384, device=1e-6),
                figure(bars.WRITE_LATENT, "tokenspeed", 16384, device=2e-6),
                figure(bars.WRITE_LATENT, "tokenspeed pdl", 16384, device=0.9e-6),
                figure(bars.WRITE_LATENT, "sglang", 16384, device=5.1e-6, host=2e-6),
                figure(bars.WRITE, "triton", 1, device=1e-6, host=2e-6),
                figure(bars.WRITE, "torch", 1, device=1.1e-6),
                figure(bars.WRITE, "sglang", 1, host=1.9e-6),
            ]
        )
    }
    assert list(by_promise.values()) == [
        *(True, False, None, False),  # disjoint: 256, 1024, 4096, 16 tokens
        *(True, False),  # overlapping, permuted
        *(False, None),  # TokenSpeed's write and read
        *(True, None, True),  # SGLang's latent write; torch's write at 16 384 and at any n
        *(False, True, None, None),  # the host: write, latent write, moves
        *[None] * 8,  # quantised latent rows
        *[None] * 4,  # quantised K and V
    ]


@pytest.mark.parametrize("case", [bars.WRITE_QUANTIZED, bars.READ_QUANTIZED])
@pytest.mark.parametrize("passes", [True, False])
def test_bars_of_quantised_rows(case, passes):
    worse = 1.0 if passes else 1.1
    figures = [
        figure(case, "triton", 1, device=2e-6, host=39e-6 * worse),
        figure(case, "triton", 256, device=4.9e-6 * worse, host=20e-6),
        figure(case, "triton", 1024, device=6e-6, host=20e-6),
        figure(case, "triton", 16384, device=8e-6 * worse, host=20e-6, share=0.51 / worse),
        figure(case, "tokenspeed", 16384, device=65e-6),
        figure(case, "torch", 16384, device=9e-6, host=200e-6),
    ]
    found = [bar for bar in bars.bars(figures) if bar.promise.startswith(case)]
    assert [bar.passed for bar in found] == [passes] * 4
    values = [bar.value.partition(";")[0] for bar in found]
    if passes:
        assert values == [
            "51.0%",
            "8.12 times, against tokenspeed at 16384",
            "4.90 us, at 256",
            "39.00 us, at 1",
        ]


@pytest.mark.parametrize("case", [bars.WRITE_INT8, bars.READ_INT8])
@pytest.mark.parametrize("passes", [True, False])
def test_bars_of_quantised_keys_and_values(case, passes):
    worse = 1.0 if passes else 1.1
    figures = [
        figure(case, "triton", 1, device=2e-6),
        figure(case, "triton", 256, device=4.9e-6 * worse),
        figure(case, "triton", 1024, device=6e-6),
        figure(case, "triton", 16384, device=8e-6, share=0.51 / worse),
        figure(case, "copy", 16384, device=1e-6, share=0.9),
    ]
    found = [bar for bar in bars.bars(figures) if bar.promise.startswith(case)]
    assert [bar.passed for bar in found] == [passes] * 2
    if passes:
        values = [bar.value.partition(";")[0] for bar in found]
        assert values == ["51.0%", "4.90 us, at 256"]
