"""The command line, as a user sees it: output, files, exit codes."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvjax.__main__ as command
from kvjax.replay import cli
from kvjax.replay.kvjax_plane import KvjaxRows
from kvjax.replay.pooled_plane import PooledPlane

SERVED = ["--requests", "40", "--scale", "64", "--page-size", "4", "--concurrency", "8"]
SMALL = [*SERVED, "--layers", "2", "--head-dim", "8"]
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments):
    return command.main(["replay", *map(str, arguments)])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--requests", "0"], "--requests 0 must be at least 1"),
        (["--concurrency", "-1"], "--concurrency -1 must be at least 1"),
        (["--step-ms", "nan"], "--step-ms nan must be at least 0.001"),
        (["--scale", "3"], "scale=3 must divide the trace's blocks of 512 tokens"),
        (["--page-size", "24"], "page_size=24 and blocks of 32 tokens"),
        (["--pool", "64GB", "--page-size", "0"], "--page-size 0 must be at least 1"),
        (["--pool", "4G"], "'4G' is not an amount of memory"),
        (["--pool", "1000tokens"], "num_slots=1000 is not a multiple of page_size=16"),
        (["--pool", "1KiB"], "--pool: budget_bytes=1024 holds no page"),
        (["--pool", "9" * 400 + "GiB"], "is 8 EiB of memory or more"),
        (["--host-pool=-1tokens"], "--host-pool: '-1tokens' is not an amount of memory"),
        (["--host-pool", f"{2**31}tokens"], "--host-pool: 2147483648 tokens do not fit int32"),
        (["--host-pool", "9" * 400 + "GiB"], "is 8 EiB of memory or more"),
        (["--sweep", "1MiB,2"], "--sweep: '2' is not an amount of memory"),
        (["--sweep", "1MiB,0tokens"], "--sweep: num_slots=0 must be an integer of at least 1"),
        (["--sweep", "--pool", "112tokens"], "--sweep starts at 1/8 of --pool, whose 7 pages"),
        (["--sweep", "--pool", f"{2**30}tokens"], "--sweep: num_slots=2147483648 does not fit"),
        (["--model", "gpt-5"], "'gpt-5' is neither a file nor a preset"),
        (["--model", "qwen3-8b", "--layers", "2"], "leave out --layers"),
        (["--latent-dim", "64", "--kv-heads", "2"], "--kv-heads and --head-dim, or --latent-dim"),
        (["--rope-dim", "64"], "--kv-heads and --head-dim, or --latent-dim"),
        (["--layers", "0"], "--layers 0 must be at least 1"),
        (["--layers", "9" * 400], "must be at least 1, and less than 2**63"),
        (["no-such-trace.jsonl"], "No such file or directory: 'no-such-trace.jsonl'"),
        ([Path(__file__).parent], f"Is a directory: '{Path(__file__).parent}'"),
        (["--quantization", "per_token_head"], "quantization='per_token_head' is not for K and V"),
        (["--share"], "--share needs --backend both, not jax"),
        (["--share", "0", "--backend", "both"], "--share 0 must be at least 1"),
        (["--sweep", "--backend", "torch"], "--sweep moves no rows; leave out --backend torch"),
        (["--plot", "plot.jpg"], "--plot plot.jpg must end in .png"),
        (["--plot", "no-such-folder/plot.png"], "and be in a folder that exists"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(capsys, arguments, message):
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("kvjax replay: ")
    assert message in captured.err


def test_a_wrong_line_of_a_trace_is_named(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n{')
    assert run(path) == 2
    assert capsys.readouterr().err.startswith(f"kvjax replay: {path}:2: not JSON")


@pytest.mark.parametrize("content", [PNG, bytes(range(256)), b"\0" * 64])
def test_a_binary_trace_is_refused_in_one_line(capsys, tmp_path, content):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    assert run(path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvjax replay: {path}:1: not JSON: ")


def test_a_sweep_may_start_at_a_single_page(capsys):
    assert run(*SMALL, "--pool", "32tokens", "--sweep", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [point["pool_tokens"] for point in result["points"]] == [2**n for n in range(2, 9)]


def test_unknown_options_are_refused():
    with pytest.raises(SystemExit, match="2"):
        run("--pol", "4GiB")


def test_plots_say_that_they_need_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert run("--plot", tmp_path / "out.png") == 2
    assert "pip install 'kvjax[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["torch", "both"])
def test_torch_says_that_it_has_to_be_there(capsys, monkeypatch, backend):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert run("--backend", backend) == 2
    assert f"--backend {backend} needs torch and triton: pip" in capsys.readouterr().err


def test_a_sweep_has_a_row_for_each_pool_size(capsys, tmp_path):
    plot = tmp_path / "sweep.png"
    assert run(*SMALL, "--sweep", "1MiB,2048tokens", "--host-pool", "0tokens", "--plot", plot) == 0
    printed = capsys.readouterr().out
    assert "scheduling only" in printed
    rows = [line.split() for line in printed.splitlines()[-3:]]
    assert [row[:3] for row in rows[:2]] == [["1", "MiB", "8,188"], ["256.5", "KiB", "2,048"]]
    assert rows[2][0] == "unlimited"
    assert plot.read_bytes().startswith(PNG)


def test_a_sweep_as_json(capsys):
    assert run(*SMALL, "--pool", "8192tokens", "--sweep", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    rates = [point["hit_rate"] for point in result["points"]]
    assert [point["pool_tokens"] for point in result["points"]] == [2**n for n in range(10, 17)]
    assert rates == sorted(rates)
    assert rates[-1] <= result["unlimited_hit_rate"]


def test_bench_hands_over_its_arguments(monkeypatch, tmp_path, capsys):
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("benchmarks", "benchmarks.__main__"):
        monkeypatch.delitem(command.sys.modules, name, raising=False)
    assert command.main(["bench", "write", "--n", "16", "-h"]) == 0
    assert capsys.readouterr().out == "['write', '--n', '16', '-h']\n"


def test_bench_says_where_it_is_found(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main(["bench"]) == 2
    assert "clone of the repository" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory):
    """Conversations that grow, over more prefixes than the pools below hold."""
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    prefixes, lines, next_id = [(0,)], [], 1
    for number in range(60):
        prefix = prefixes[random.integers(len(prefixes))]
        added = int(random.integers(1, 4))
        hash_ids = (*prefix, *range(next_id, next_id + added))
        next_id += added
        prefixes.append(hash_ids[:-1])  # the last block is partial
        lines.append(
            {
                "timestamp": 600 * number,
                "input_length": (len(hash_ids) - 1) * 512 + 300,
                "output_length": int(random.integers(1, 900)),
                "hash_ids": hash_ids,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


TINY = ["--scale", "64", "--page-size", "4", "--concurrency", "4", "--layers", "2"]
TINY += ["--head-dim", "8", "--compact-every", "9", "--verify-every", "5"]
TINY += ["--pool", "256tokens", "--host-pool", "160tokens"]


def test_a_replay_uses_everything_and_is_verified(capsys, trace_path, tmp_path):
    plot = tmp_path / "replay.png"
    assert run(trace_path, *TINY, "--plot", plot) == 0
    printed = capsys.readouterr().out
    assert "60 requests of small.jsonl" in printed
    assert printed.endswith("verified, bit for bit\n")
    assert plot.read_bytes().startswith(PNG)


def test_json_has_what_happened(capsys, trace_path):
    assert run(trace_path, *TINY, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["requests_finished"] == 60
    assert result["verification"]["ok"] is True
    assert result["pages"]["free"] + result["pages"]["cached"] == result["pages"]["total"] == 64
    for count in ("offloaded_tokens", "restored_tokens", "moved_tokens", "dropped_units"):
        assert result[count] > 0
    assert result["prefill_tokens"] == result["input_tokens"] * (1 - result["hit_rate"])
    for part in ("sampled_rows", "device_rows", "host_rows"):
        assert result["verification"][part] > 0
    assert sum(result["seconds"].values()) == pytest.approx(result["wall_seconds"])


def test_a_latent_cache_is_replayed(capsys, trace_path):
    latent = ["--latent-dim", "16", "--rope-dim", "4", "--dtype", "float16"]
    options = [option for option in TINY if option not in ("--head-dim", "8")]
    assert run(trace_path, *options, *latent) == 0
    printed = capsys.readouterr().out
    assert "2 layers, MLA latent 16 + rope 4" in printed
    assert printed.endswith("verified, bit for bit\n")


@pytest.mark.parametrize(
    "quantization, dtypes",
    [
        ("per_token_head", ["float8_e4m3fn", "float32", "bfloat16"]),
        ("int8_per_token_head", ["int8", "float32"] * 2),
    ],
)
def test_a_quantized_cache_is_replayed(capsys, trace_path, quantization, dtypes):
    options = [*TINY, "--quantization", quantization]
    if quantization == "per_token_head":
        options = [option for option in options if option not in ("--head-dim", "8")]
        options += ["--latent-dim", "16", "--rope-dim", "4"]
    assert run(trace_path, *options, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["dtypes"] == dtypes
    assert result["verification"]["device_rows"] > 0


def test_sizes_of_a_quantized_cache_are_compared(capsys, trace_path):
    options = [*TINY, "--quantization", "fp8_per_token_head"]
    assert run(trace_path, *options, "--sweep", "32tokens,64tokens", "--json") == 0
    points = json.loads(capsys.readouterr().out)["points"]
    # Of 2 layers, K and V, 2 heads: 8 bytes and a scale; the padding page is of 4 tokens.
    assert [point["pool_bytes"] for point in points] == [36 * 96, 68 * 96]


def test_requests_larger_than_the_pool_are_reported(capsys, trace_path):
    assert run(trace_path, *TINY[:-4], "--pool", "32tokens", "--host-pool", "0tokens") == 0
    printed = capsys.readouterr().out
    (rejected,) = (line for line in printed.splitlines() if line.startswith("rejected"))
    assert "requests larger than the pool: number " in rejected
    assert printed.endswith("verified, bit for bit\n")


def test_a_pool_larger_than_memory_is_refused(capsys):
    assert run(*SMALL, "--pool", "100TiB", "--head-dim", "4096", "--host-pool", "0tokens") == 2
    assert "kvjax replay: no room for a pool of " in capsys.readouterr().err


def test_without_a_trace_it_says_what_it_serves(capsys):
    assert run("--requests", "3", *TINY, "--pool", "8192tokens") == 0
    printed = capsys.readouterr().out
    assert "3 requests generated, with the statistics of Mooncake's conversation trace" in printed


def test_no_more_run_at_once_than_there_are(capsys, trace_path):
    assert run(trace_path, *TINY, "--requests", "3", "--concurrency", 10**18) == 0
    assert capsys.readouterr().out.endswith("verified, bit for bit\n")


def test_memory_that_runs_out_while_preparing_is_said(capsys, monkeypatch):
    def generate(num_requests, seed):
        raise MemoryError

    monkeypatch.setattr(cli.workload, "generate", generate)
    assert run(*SMALL) == 2
    assert capsys.readouterr().err == "kvjax replay: out of memory\n"


def test_a_wrong_row_fails_the_replay(capsys, trace_path, monkeypatch):
    def flipped(self, slots):
        k, v = read(self, slots)
        v = v.copy()
        v[-1, -1, -1, -1] ^= 1
        return k, v

    read = KvjaxRows.read
    monkeypatch.setattr(KvjaxRows, "read", flipped)
    assert run(trace_path, *TINY) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    assert printed.endswith("FAILED: 1 wrong rows\n")


def test_a_wrong_sample_stops_the_replay(capsys, trace_path, monkeypatch):
    read_layer = KvjaxRows.read_layer
    monkeypatch.setattr(
        KvjaxRows,
        "read_layer",
        lambda self, layer_id, slots: tuple(rows + 1 for rows in read_layer(self, layer_id, slots)),
    )
    assert run(trace_path, *TINY) == 1
    printed = capsys.readouterr().out
    assert "requests in 5 steps" in printed
    assert printed.endswith("FAILED: 64 wrong rows\n")


def test_control_c_prints_the_summary_so_far(capsys, trace_path, monkeypatch):
    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) == 50:
            raise KeyboardInterrupt
        return decode(self, *arguments)

    calls, decode = [], PooledPlane.decode
    monkeypatch.setattr(PooledPlane, "decode", interrupted)
    assert run(trace_path, *TINY) == 130
    printed = capsys.readouterr().out
    assert "requests in 49 steps" in printed
    assert printed.endswith("interrupted; nothing was read back\n")
