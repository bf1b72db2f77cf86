"""A state machine that does the same to one of TokenSpeed's own pools, and to ours.

Those of kvtorch, kvjax and NumPy. What TokenSpeed's get wrong they are not asked for:

===============  ==================================================  ===============================
row              what is wrong                                       what all are given instead
===============  ==================================================  ===============================
A-KV-6, A-IDX    wraps, crashes, or keeps padding where slots are    slots that are there
                 not there
A-MHA-4          ``np.int64`` for bytes                              compared as numbers
A-MHA-14a, S1    divides the caller's tensors in place               tensors of their own
A-MHA-14b        divides in the caller's dtype                       scales with float32 alone
A-MHA-14c        looks at the dtype of K alone                       K and V of one dtype
A-FP8            overflow depends on the version of torch            values that fit
A-MLA-2          forgets all strides but the first                   parts in one piece
B-M-6, B-M-8     with a kernel: powers of two, races, tiles of the   such numbers, none both source
                 first plane                                         and target, a wide first plane
B-M-10           cannot count a quantised pool                       it is not asked
B-M-15, S3       joined plain rows are not cast; fp8 fails           rows of the pool's dtype; parts
B-M-16           looks at the dtype of the latent alone              parts of one dtype
B-M-17           quantised reads do not wait, are of the pool's fp8  waits unseen; a dtype is named
B-Q, S4, FP4     infinities, float16 models, dtypes but e4m3fn       finite values; no such pools
B-K-1, B-K-2     widths that depend on the number of tokens          a latent of 256, a rope of 16
===============  ==================================================  ===============================
"""

import ctypes

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtorch import tokenspeed as ours
from tests import oracles
from tests.equivalence.machine import stored_rows
from tests.equivalence.peers import without_payload
from tests.equivalence.tokenspeed_peers import CHUNK, Peers
from tests.pools.junk import numbers
from tests.strategies import seeds
from tests.torch.pools import Counter, Layer, flattened
from tests.torch.tensors import to_numpy, to_torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FIRST, STOP, LAYERS, LATENT = 4, 24, 3, 256
LARGEST = 100.0
"""Of the values: divided by the smallest scale, 0.3, they still fit into fp8."""


def mha(dtype, copy=False):
    rest = (LAYERS, "cpu", False, 8, 64, FIRST, 0, copy)
    return "MHATokenToKVPool", (STOP - FIRST, dtype, 2, 16, *rest)


def mla(dtype, copy=False, model=BF16, quant=None):
    rest = (LATENT, 16, LAYERS, "cpu", False, 8, 64, FIRST, 0, copy)
    return "MLATokenToKVPool", (STOP - FIRST, model, dtype, quant, *rest)


CASES = {  # a class and its arguments
    "mha-bfloat16": mha(BF16),
    "mha-float16-kernel": mha(FP16, True),
    "mha-e4m3fn-kernel": mha(E4M3, True),
    "mha-e5m2": mha(E5M2),
    "mla-bfloat16-kernel": mla(BF16, True),
    "mla-e4m3fn": mla(E4M3),
    "quantised-bfloat16": mla(E4M3, quant="per_token_head"),
    "quantised-float32-kernel": mla(E4M3, True, FP32, "per_token_head"),
}


def machine(theirs, case, mutant=None, kvjax_peer=None):
    """The state machine of one of TokenSpeed's pools, one of kvtorch's, NumPy's and maybe kvjax's.

    Its attribute ``num_steps`` counts the calls that all were given.
    """
    name, args = CASES[case]
    is_mha, is_quantised = name.startswith("MHA"), "per_token_head" in args
    dtype, has_kernel = args[1] if is_mha else args[2], args[-1]
    sources = [FP32, BF16, FP16] if is_quantised else [dtype, FP32, BF16]
    layers = st.integers(0, LAYERS - 1)
    there = st.integers(FIRST, STOP - 1)

    def some(num_tokens, among=there):
        return st.lists(among, min_size=num_tokens, max_size=num_tokens, unique=True)

    distinct = st.sampled_from([0, 1, 5, 8]).flatmap(some)
    locs = st.builds(torch.tensor, distinct, dtype=st.sampled_from([torch.int32, torch.int64]))

    def junk(seed, shape, of):
        """Any bits, but none that the interpreter of TokenSpeed's kernels takes for others."""
        return to_torch(numbers(seed, shape, str(of).removeprefix("torch."), any_bits=is_mha))

    def values(seed, num_tokens, width, source):
        shape = (num_tokens, *width)
        if source == dtype and not is_quantised:
            return junk(seed, shape, dtype)
        rng = np.random.default_rng(seed)
        sizes = 10.0 ** rng.uniform(-4, 2, (num_tokens, 1, 1)) * (
            rng.random((num_tokens, 1, 1)) < 0.9
        )
        return torch.tensor(np.clip(rng.standard_normal(shape) * sizes, -LARGEST, LARGEST)).to(
            source
        )

    class Machine(RuleBasedStateMachine):
        num_steps = 0

        def __init__(self):
            super().__init__()
            self.pools = [(mutant or getattr(ours, name))(*args), getattr(theirs, name)(*args)]
            self.copies = None
            for pool in self.pools:
                pool.offload_chunk_page_num = CHUNK
                pool.register_layer_transfer_counter(Counter())
                for buffer, rows in zip(buffers_of(pool), self.rows(), strict=True):
                    buffer[FIRST:] = rows.view(buffer.dtype)
            self.peers = Peers(self.pools[0], kvjax_peer)

        def rows(self):
            """What each buffer holds at first."""
            if is_quantised:
                planes = stored_rows(0, self.pools[0].geometry, LAYERS, STOP - FIRST)
                return [to_torch(rows) for layer in zip(*planes, strict=True) for rows in layer]
            shapes = [buffer[FIRST:].shape for buffer in buffers_of(self.pools[0])]
            return [junk(i, shape, dtype) for i, shape in enumerate(shapes)]

        def on_both(self, method, *args, has_payload=True):
            """Makes the same call on both; what each returned."""
            Machine.num_steps += 1
            results = []
            for pool in self.pools:
                given = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
                results.append(getattr(pool, method)(*given))
                if pool is self.pools[0]:
                    assert_same(given, list(args))
            assert_same(*results, has_payload)
            return results

        @invariant()
        def same(self):
            assert_same(*map(buffers_of, self.pools))
            self.peers.assert_hold(self.pools[0])
            assert_same(*[pool.layer_transfer_counter.waits for pool in self.pools])

        @rule(
            seed=seeds,
            loc=locs,
            layer=layers,
            source=st.sampled_from(sources),
            scales=st.tuples(*[st.sampled_from([None, 0.5, 0.3, 1.7, 100.0])] * 2),
            named=st.booleans(),
        )
        def write(self, seed, loc, layer, source, scales, named):
            if is_mha:
                k, v = (values(seed + i, len(loc), (2, 16), source) for i in range(2))
                scales = scales if source in (FP32, dtype) else (None, None)
                where = (Layer(0), layer) if named else (Layer(layer), None)
                self.on_both("set_kv_buffer", where[0], loc, k, v, *scales, where[1])
                self.peers.write(layer, loc, [k, v], scales)
            elif is_quantised or dtype.itemsize > 1:
                source = source if is_quantised else dtype
                rows = values(seed, len(loc), (1, LATENT + 16), source)
                self.on_both("set_kv_buffer", Layer(layer), loc, rows, None)
                self.peers.write(layer, loc, [rows], [None])

        @precondition(lambda _: not is_mha)
        @rule(seed=seeds, loc=locs, layer=layers, source=st.sampled_from(sources))
        def write_parts(self, seed, loc, layer, source):
            parts = [values(seed + w, len(loc), (1, w), source) for w in (LATENT, 16)]
            self.on_both("set_mla_kv_buffer", Layer(layer), loc, *parts)
            self.peers.write_parts(layer, loc, parts)

        @precondition(lambda _: not is_mha)
        @rule(
            loc=st.lists(there, max_size=8).map(lambda x: torch.tensor(x, dtype=torch.int64)),
            layer=layers,
            into=st.sampled_from([None, BF16, FP32]),
        )
        def read_parts(self, loc, layer, into):
            into = into or (args[1] if is_quantised else None)
            has_payload = into is None or into == dtype
            found = self.on_both(
                "get_mla_kv_buffer", Layer(layer), loc, into, has_payload=has_payload
            )
            self.peers.read_parts(layer, loc, into, found[0])
            if is_quantised:
                assert self.pools[0].layer_transfer_counter.waits.pop() == layer

        @rule(layer=layers, pair=some(2))
        def getters(self, layer, pair):
            self.on_both("get_key_buffer", layer)
            self.on_both("get_value_buffer", layer)
            results = self.on_both("get_kv_buffer", layer)
            self.peers.layer(layer, flattened(results[0] if is_mha else results[0][0]))
            self.peers.copy_row(layer, *pair)
            for result in results:
                for tensor in flattened(result):
                    tensor[pair[0]].copy_(tensor[pair[1]])  # the pool's own memory

        @rule(data=st.data())
        def move(self, data):
            if has_kernel:
                both = data.draw(st.sampled_from([2, 4, 8]).flatmap(some))
                dst, src = both[::2], both[1::2]
            else:
                dst = data.draw(distinct)
                src = data.draw(st.lists(there, min_size=len(dst), max_size=len(dst)))
            locs = [torch.tensor(x, dtype=torch.int64) for x in (dst, src)]
            self.on_both("move_kv_cache", *locs)
            self.peers.move(*locs)

        @rule(tokens=distinct, as_list=st.booleans())
        def offload(self, tokens, as_list):
            given = tokens if as_list else torch.tensor(tokens, dtype=torch.int64)
            self.copies = len(tokens), self.on_both("get_cpu_copy", given)
            self.peers.offload(tokens, self.copies[1][0])

        @precondition(lambda self: self.copies is not None)
        @rule(data=st.data())
        def restore(self, data):
            """Each of torch's takes the other's copy."""
            num_tokens, copies = self.copies
            loc = torch.tensor(data.draw(some(num_tokens)), dtype=torch.int64)
            for pool, copy in zip(self.pools, copies[::-1], strict=True):
                pool.load_cpu_copy(copy, loc)
            self.peers.restore(loc)

        @precondition(lambda _: is_mha)
        @rule(data=st.data(), loc=locs)
        def flat_data(self, data, loc):
            flat = self.on_both("get_flat_data", loc)
            new_loc = torch.tensor(data.draw(some(len(loc))), dtype=torch.int64)
            self.peers.flat_data(loc, flat[0], new_loc)
            for pool, other in zip(self.pools, flat[::-1], strict=True):
                pool.transfer(new_loc, other)

        @rule(start=st.integers(0, 9))
        def infos(self, start):
            self.on_both("get_layerwise_buf_info_offsets", start)
            assert_same(*[pool.page_size_bytes for pool in self.pools])
            assert_same(*map(memory_of, self.pools))
            if not is_quantised:
                mine, other = (pool.get_kv_size_bytes() for pool in self.pools)
                assert mine == other

    return Machine


def buffers_of(pool):
    buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else pool.k_buffer + pool.v_buffer
    return flattened(buffers)


def memory_of(pool):
    """What lies at each address that a pool tells, and how long it says that is."""
    addresses, lengths, page_lengths = pool.get_contiguous_buf_infos()
    strides = pool.data_strides.tolist()
    places = [*zip(addresses, lengths, strict=True)]
    places += [(p, STOP * n) for p, n in zip(pool.data_ptrs.tolist(), strides, strict=True)]
    return [ctypes.string_at(*place) for place in places], lengths, page_lengths, strides


def assert_same(actual, expected, has_payload=True):
    """Of the same types, shapes, strides and bits, but for those of NaNs without payload."""
    assert type(actual) is type(expected)
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, has_payload)
    elif isinstance(expected, torch.Tensor):
        assert actual.shape == expected.shape and actual.is_contiguous() == expected.is_contiguous()
        assert actual.is_contiguous() or actual.stride() == expected.stride()
        given = None if has_payload else actual.dtype
        arrays = [without_payload(to_numpy(tensor), given) for tensor in (actual, expected)]
        oracles.assert_same_bits(*arrays)
    else:
        assert actual == expected


def drive(pools, max_examples, **more):
    # Shrinking takes minutes.
    options = settings(max_examples=max_examples, phases=[Phase.generate], **more)
    run_state_machine_as_test(pools, settings=settings(options, stateful_step_count=40))
