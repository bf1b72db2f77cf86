"""The command line, as a user sees it: output, files, exit codes."""

import json

import pytest

import kvjax.__main__ as command
from kvjax.replay import cli

SERVED = ["--requests", "40", "--scale", "64", "--page-size", "4", "--concurrency", "8"]
SMALL = [*SERVED, "--layers", "2", "--head-dim", "8"]
TIGHT = ["--pool", "3072tokens", "--host-pool", "4096tokens", "--compact-every", "20"]
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
        (["--pool", "1KiB"], "holds no page"),
        (["--host-pool=-1tokens"], "'-1tokens' is not an amount of memory"),
        (["--sweep", "1MiB,2"], "'2' is not an amount of memory"),
        (["--model", "gpt-5"], "'gpt-5' is neither a file nor a preset"),
        (["--model", "qwen3-8b", "--layers", "2"], "leave out --layers"),
        (["--latent-dim", "64", "--kv-heads", "2"], "--kv-heads and --head-dim, or --latent-dim"),
        (["--rope-dim", "64"], "--kv-heads and --head-dim, or --latent-dim"),
        (["--layers", "0"], "layers"),
        (["no-such-trace.jsonl"], "No such file"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(capsys, arguments, message):
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvjax replay: ")
    assert message in captured.err


def test_a_wrong_line_of_a_trace_is_named(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n{')
    assert run(path) == 2
    assert capsys.readouterr().err.startswith(f"kvjax replay: {path}:2: not JSON")


def test_unknown_options_are_refused():
    with pytest.raises(SystemExit, match="2"):
        run("--pol", "4GiB")


def test_plots_say_that_they_need_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert run("--plot", tmp_path / "out.png") == 2
    assert "pip install 'kvjax[plot]'" in capsys.readouterr().err


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
