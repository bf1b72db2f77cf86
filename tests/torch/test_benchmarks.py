"""The benchmark of kvtorch: what it calls is right, what it prints is what it measured.

No GPU is needed: a clock that calls without timing stands for the real one, and the peers' kernels
run in Triton's interpreter, in a process of their own because the peers replace modules.
"""

import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch: not installed")

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import bars, peers, torch_cases, torch_side, torch_time  # noqa: E402
from benchmarks.report import Figure  # noqa: E402
from benchmarks.torch_allocations import NAMES, allocations  # noqa: E402
from benchmarks.torch_cases import CASES, OF_ONE_LAYER, OURS, Sizes, contenders  # noqa: E402
from tests import oracles  # noqa: E402
from tests.torch.tensors import to_numpy  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
TINY = Sizes(layers=2, num_slots=48, heads=2, head_dim=16, latent_dim=256, rope_dim=64)
SEVERAL = [1, 8]
NAN_IN_FP8 = 0x7F  # what is less is a number


class CallsOnce:
    """A clock that has no time."""

    device = "cpu"
    called = 0

    def device_name(self):
        return "no device"

    def copy_bandwidth(self):
        return 1e12

    def on_device(self, call, inputs, prepare):
        prepare(True)
        for arguments in inputs:
            call(*arguments)
            self.called += 1
        prepare(False)
        return 2e-6

    def on_host(self, contenders):
        for eager in contenders.values():
            eager.before()
            eager.call(*eager.inputs[0])
            self.called += 1
        return dict.fromkeys(contenders, 3e-6)


def tables(pool):
    """Every layer of every plane, whosever pool it is."""
    for name in ("k_buffer", "k_scale_buffer", "v_buffer", "v_scale_buffer", "kv_buffer"):
        for table in getattr(pool, name, []):
            yield from table if isinstance(table, tuple) else [table]
    if hasattr(pool, "latent_dim"):  # that of plain torch
        yield from itertools.chain(*pool.planes)


def outcome(case, contender, num_tokens):
    """What three calls return and leave in a pool of known contents."""
    torch.manual_seed(0)
    for table in tables(contender.pool):
        if table.dtype.itemsize == 1:
            table.random_(0, NAN_IN_FP8)
        else:
            table.normal_()
        table[: TINY.page_size] = 0
    rng = np.random.default_rng(num_tokens)
    contender.prepare(False)
    results = []
    for repetition in range(3):
        inputs = case.inputs(TINY, rng, num_tokens, repetition, "cpu")
        results.append(case.call_of(contender)(*inputs))
    returned = [part for result in results if result is not None for part in result]
    return [*returned, *tables(contender.pool)]


def unequal(case, found, num_tokens):
    """The contenders that do not do what plain torch does."""
    (expected,) = (outcome(case, c, num_tokens) for c in found if c.name == "torch")
    wrong = []
    for contender in found:
        got = outcome(case, contender, num_tokens)
        if len(got) != len(expected) or not all(map(torch.equal, got, expected)):
            wrong.append(contender.name)
    return wrong


@pytest.mark.parametrize("num_tokens", [1, 8, 24])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_does_the_same_with_ours_and_plain_torch(case, num_tokens):
    found = contenders(case.kind, TINY, "cpu", {}, OURS)
    assert [contender.name for contender in found] == ["triton", "torch"]
    assert unequal(case, found, num_tokens) == []


@pytest.mark.parametrize("num_tokens", [1, 8, 24])
def test_the_copy_beside_them_moves_as_many_bytes(num_tokens):
    for case in (case for case in CASES if "copy" in case.contenders):
        (copy,) = contenders(case.kind, TINY, "cpu", {}, ["copy"])
        copied = set()
        for repetition in range(3):
            copy.pool._source.fill_(1)
            copy.pool._target.zero_()
            inputs = case.inputs(TINY, np.random.default_rng(), num_tokens, repetition, "cpu")
            case.call_of(copy)(*inputs)
            rows, columns = copy.pool._target.nonzero(as_tuple=True)
            assert 2 * 2 * len(rows) == case.bytes_moved(TINY, num_tokens)
            assert columns[0] == 0  # else it starts where memory is read more slowly
            copied.add(int(rows[0]))
        assert len(copied) > 1


def test_a_pool_that_does_nothing_is_found_out():
    for case in CASES:
        found = contenders(case.kind, TINY, "cpu", {}, OURS)
        idle = types.SimpleNamespace(
            **{name: lambda *_, **__: None for name in dir(found[0].pool) if "_buffer" in name},
            move_kv_cache=lambda *_, **__: None,
        )
        for name in found[0].pool._BUFFERS:
            setattr(idle, name, getattr(found[0].pool, name))
        found.append(torch_cases.Contender("idle", idle))
        assert unequal(case, found, 8) == ["idle"], case.name


@pytest.mark.parametrize("num_tokens", [1, 8, 24])
def test_quantised_cases_do_what_numpy_does(num_tokens):
    write, read = (
        case for case in CASES if case.name in (bars.WRITE_QUANTIZED, bars.READ_QUANTIZED)
    )
    assert write.kind == read.kind == "quantised MLA"
    for contender in contenders(write.kind, TINY, "cpu", {}, OURS):
        rng = np.random.default_rng(num_tokens)
        layer, slots, *parts = write.inputs(TINY, rng, num_tokens, 1, "cpu")
        contender.prepare(False)
        write.call_of(contender)(layer, slots, *parts)
        rows = [table[slots] for table in contender.pool.kv_buffer[layer.layer_id]]
        expected = oracles.quantize(*map(to_numpy, parts), "bfloat16")
        for have, want in zip(rows, expected, strict=True):
            oracles.assert_same_bits(to_numpy(have), want)
        returned = read.call_of(contender)(layer, slots)
        expected = oracles.dequantize(*expected, "bfloat16")
        for have, want in zip(returned, expected, strict=True):
            oracles.assert_same_bits(to_numpy(have), want)


@pytest.mark.parametrize("num_tokens", [1, 8, 24])
def test_cases_of_int8_do_what_numpy_does(num_tokens):
    write, read = (case for case in CASES if case.name in (bars.WRITE_INT8, bars.READ_INT8))
    assert write.kind == read.kind == "quantised MHA"
    for contender in contenders(write.kind, TINY, "cpu", {}, OURS):
        rng = np.random.default_rng(num_tokens)
        layer, slots, *parts = write.inputs(TINY, rng, num_tokens, 1, "cpu")
        write.call_of(contender)(layer, slots, *parts)
        returned = read.call_of(contender)(layer, slots)
        for name, part, found in zip("kv", parts, returned, strict=True):
            rows, scale = oracles.quantize_kv(to_numpy(part), "int8")
            layers = [f"{name}_buffer", f"{name}_scale_buffer"]
            tables = [getattr(contender.pool, each)[layer.layer_id][slots] for each in layers]
            oracles.assert_same_bits(to_numpy(tables[0]), rows.view(np.int8))
            oracles.assert_same_bits(to_numpy(tables[1]), scale)
            expected = oracles.dequantize_kv(rows, scale, "int8", "bfloat16")
            oracles.assert_same_bits(to_numpy(found), expected)


def test_slots_are_as_the_names_say():
    inputs = {case.name: case.inputs for case in CASES}
    arguments = (Sizes(), np.random.default_rng(0), 1000, 0, "cpu")
    common = {}
    for name in (bars.DISJOINT, bars.OVERLAPPING, bars.PERMUTED):
        dst, src = (set(slots.tolist()) for slots in inputs[name](*arguments))
        assert len(dst) == len(src) == 1000
        assert min(dst | src) >= Sizes.page_size
        assert max(dst | src) < Sizes.page_size + Sizes.num_slots
        common[name] = len(dst & src)
    assert common == {bars.DISJOINT: 0, bars.OVERLAPPING: 20, bars.PERMUTED: 1000}


def test_bytes_moved():
    moved = {case.name: case.bytes_moved(Sizes(), 10) for case in CASES}
    assert moved[bars.WRITE] == 2 * 10 * 2 * 8 * 128 * 2
    assert moved[bars.DISJOINT] == 32 * moved[bars.WRITE]
    assert moved[bars.WRITE_LATENT] == moved[bars.READ_LATENT] == 2 * 10 * (512 + 64) * 2
    quantized = 10 * ((512 + 64) * 2 + 512 + 4 + 64 * 2)
    assert moved[bars.WRITE_QUANTIZED] == moved[bars.READ_QUANTIZED] == quantized
    in_int8 = 10 * 2 * 8 * (128 * 2 + 128 + 4)
    assert moved[bars.WRITE_INT8] == moved[bars.READ_INT8] == in_int8


def test_allocators_hand_out_distinct_slots():
    found = allocations("cpu", {})
    assert [allocation.case for allocation in found] == [NAMES[0]] * 2 + [NAMES[1]] * 2
    for allocation in found:
        for _ in range(2):
            allocation.reset()
            slots = allocation.call().tolist()
            assert len(set(slots)) == allocation.num_tokens
            assert min(slots) >= 16


def arguments(**given):
    defaults = {
        "sglang": None,
        "tokenspeed": None,
        "most_moved_by_peers": None,
        "save": None,
        "tokens": SEVERAL,
    }
    return types.SimpleNamespace(**(defaults | given))


def all_names():
    return [*(case.name for case in CASES), *NAMES]


def test_a_whole_run_is_printed_and_saved(tmp_path, capsys):
    clock = CallsOnce()
    assert torch_side.run(arguments(save=tmp_path), all_names(), TINY, clock) == 0
    about, *figures = json.loads((tmp_path / "figures.json").read_text())
    assert f"torch {torch.__version__}" in " ".join(map(" ".join, about.items()))
    there = [name for case in CASES for name in case.contenders if name in OF_ONE_LAYER]
    assert len(figures) == len(there) * len(SEVERAL) + 4
    assert clock.called == len(there) * len(SEVERAL) * 11 + 4
    out = capsys.readouterr().out
    assert out.partition("bars:")[0].count(" 2.00 ") == len(there) * len(SEVERAL)
    markdown = (tmp_path / "figures.md").read_text()
    for figure in figures:
        assert f"| {figure['case']} | {figure['num_tokens']} |" in markdown
    for bar in bars.bars([Figure(**figure) for figure in figures]):
        assert str(bar) in out
        assert str(bar) in markdown
    assert (tmp_path / "figures.png").stat().st_size > 1000


def test_hosts_figures_alone_have_no_plot(tmp_path):
    assert torch_side.run(arguments(save=tmp_path), NAMES, TINY, CallsOnce()) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "figures.md"]


def test_what_fails_is_left_out_and_named(capsys):
    class FailsOnce(CallsOnce):
        def on_device(self, call, inputs, prepare):
            self.called += 1
            if self.called == 1:
                raise ValueError("out of order\nmore")
            return 2e-6

    assert torch_side.run(arguments(), [bars.WRITE], TINY, FailsOnce()) == 1
    out = capsys.readouterr().out
    assert "left out: write K+V, 1 tokens, triton: ValueError: out of order\n" in out
    assert out.count(" 2.00 ") == 5


@pytest.mark.parametrize(
    "words, error",
    [
        (["torch", "nothing like it"], "no case has a name like that"),
        (["torch", "--tokens", "0"], "nothing to measure below 1"),
        (["torch", "--sglang"], "expected one argument"),
    ],
)
def test_arguments_that_cannot_be_used(words, error, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(words)
    assert stopped.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("words", [["torch"], ["jax"], [], ["write"]])
def test_without_a_gpu_it_says_so(words, monkeypatch, capsys):
    import jax

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert command.main(words) == 2
    framework = "torch" if words == ["torch"] else "JAX"
    assert f"measure a GPU, and {framework} sees none" in capsys.readouterr().err


@pytest.mark.parametrize("words, option", [(["torch"], "--tokenspeed"), ([], "benchmarks torch")])
def test_help_names_the_other_side_and_the_peers(words, option, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([*words, "--help"])
    assert stopped.value.code == 0
    assert option in capsys.readouterr().out


def test_peers_that_are_not_there_are_left_out(tmp_path, capsys):
    given = arguments(sglang=tmp_path / "a", tokenspeed=tmp_path / "b")
    before = dict(sys.modules)
    assert torch_side.load_peers(given) == {}
    assert sys.modules == before
    error = capsys.readouterr().err
    assert "sglang is left out" in error
    assert "tokenspeed is left out" in error
    assert "memory_pool.py; need the folder of an unpacked wheel" in error


def test_moves_of_peers_stop_where_compilation_takes_minutes():
    def measured(name, num_tokens, **options):
        bench = torch_side.Bench(CallsOnce(), TINY, {}, **options)
        (case,) = (case for case in CASES if case.name == bars.DISJOINT)
        return bench._can(case, torch_cases.Contender(name, None), num_tokens)

    assert measured("triton", 16384)
    assert measured("triton", 3)
    assert measured("sglang", 256)
    assert measured("sglang", 3)
    assert not measured("sglang", 1024)
    assert measured("sglang", 1024, most_moved_by_peers=1024)
    assert measured("tokenspeed", 256)
    assert not measured("tokenspeed", 3)


class Cuda:
    """Stands for ``torch.cuda``, where graphs and events are counted and all takes 1 ms."""

    def __init__(self):
        self.replays, self.captures, self.capturing = 0, 0, False

    def Event(self, enable_timing):
        return types.SimpleNamespace(
            record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 1.0
        )

    def CUDAGraph(self):
        def replay():
            self.replays += 1

        return types.SimpleNamespace(replay=replay)

    @contextlib.contextmanager
    def graph(self, _):
        self.captures += 1
        self.capturing = True
        yield
        self.capturing = False

    def synchronize(self):
        assert not self.capturing


def test_the_clock(monkeypatch):
    cuda = Cuda()
    for name in ("Event", "CUDAGraph", "graph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch_time, "COPIED_BYTES", 1000)
    clock = torch_time.Clock("cpu")
    assert clock.copy_bandwidth() == pytest.approx(2 * 1000 * 10 / 1e-3)
    seen, prepared = [], []
    inputs = [(number,) for number in range(10)]

    def call(number):
        seen.append((number, cuda.capturing))

    seconds = clock.on_device(call, inputs, prepared.append)
    # 1 ms for two replays of ten calls each.
    assert seconds == pytest.approx(1e-3 / (2 * 10))
    assert seen == [(n, False) for n in range(10)] + [(n, True) for n in range(10)]
    assert prepared == [False, True, False]
    assert cuda.replays == 1 + 1 + 3 * 2


def test_contenders_take_turns_on_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch_time, "ROUNDS", 2)
    seen = []

    def eager(name, device_seconds, seconds):
        def call(number):
            seen.append((name, number))
            now[0] += next(durations)

        durations = itertools.chain.from_iterable(itertools.repeat(s, 50) for s in seconds)
        inputs = [(number,) for number in range(10)]
        return torch_time.Eager(call, inputs, device_seconds, lambda: seen.append(name))

    now = [0.0]
    monkeypatch.setattr(torch_time.time, "perf_counter", lambda: now[0])
    seconds = torch_time.Clock("cpu").on_host(
        {"fast": eager("fast", 0.0, [1, 3, 2]), "slow": eager("slow", 4e-5, [5, 7, 9])}
    )
    assert seconds == {"fast": 2, "slow": 7}  # not the first batch, which warms up
    turns = [turn for turn in seen if isinstance(turn, str)]
    assert turns == ["fast", "slow"] * 3
    assert [turn for turn in seen if turn[0] == "fast"] == [
        ("fast", number % 10) for number in range(150)
    ]


@pytest.mark.parametrize(
    "device_seconds, expected", [(0.0, 50), (2e-6, 50), (1e-4, 20), (13e-3, 5), (1.0, 5)]
)
def test_batches_keep_the_queue_short(device_seconds, expected):
    assert torch_time.Eager(print, [()], device_seconds).calls_at_once == expected


def peer_folder(name):
    variable = {"sglang": "SGLANG_048", "tokenspeed": "TOKENSPEED_SRC"}[name]
    folder = os.environ.get(variable, ROOT / ".sglang" if name == "sglang" else None)
    if folder is None or not pathlib.Path(folder).is_dir():
        pytest.skip(f"{name}: no folder of it; the variable {variable} can name one")
    return folder


@pytest.mark.parametrize("name", ["sglang", "tokenspeed"])
def test_peers_do_the_same_as_plain_torch(name):
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    script = [sys.executable, __file__, name, str(peer_folder(name))]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = {
        "sglang": [bars.WRITE, bars.WRITE_LATENT, *NAMES],
        "tokenspeed": [
            *(bars.DISJOINT, bars.WRITE_LATENT, bars.READ_LATENT),
            *(bars.WRITE_QUANTIZED, bars.READ_QUANTIZED),
        ],
    }
    assert done.stdout.splitlines() == expected[name]


def check_peer(name, folder):
    """Prints the names of the operations of a peer that were found right."""
    peer = {name: getattr(peers, name)(pathlib.Path(folder))}
    for case in CASES:
        names = [each for each in case.contenders if each in ("torch", name)]
        # Triton's interpreter can run neither SGLang's move nor dependent launches.
        if name not in names or (name, case.name) == ("sglang", bars.DISJOINT):
            continue
        found = contenders(case.kind, TINY, "cpu", peer, names)
        for num_tokens in SEVERAL:
            assert unequal(case, found, num_tokens) == []
        print(case.name)
    found = allocations("cpu", peer)
    for case in NAMES:
        results = {}
        for allocation in found:
            if allocation.case == case:
                allocation.reset()
                results[allocation.name] = allocation.call()
        if name in results:
            assert torch.equal(results[name], results["triton"])
            print(case)


if __name__ == "__main__":
    check_peer(*sys.argv[1:])
