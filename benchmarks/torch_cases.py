"""What is measured of kvtorch, and which pools are set beside its own."""

import dataclasses
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from benchmarks.peers import Peer
from benchmarks.plain_torch import (
    FP8,
    ContiguousCopy,
    IndexPool,
    QuantizedIndexPool,
    QuantizedLatentIndexPool,
)
from kvtorch import tokenspeed
from kvtorch.pools.mha import MHATokenToKVPool
from kvtorch.pools.mla import MLATokenToKVPool
from kvtorch.pools.quantized_mha import QuantizedMHATokenToKVPool

DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of all pools; by default so large that no cache holds much of one."""

    layers: int = 32
    num_slots: int = 65536 - 16
    page_size: int = 16
    heads: int = 8
    head_dim: int = 128
    latent_dim: int = 512
    rope_dim: int = 64

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes of a token in one layer, all planes: once as the model has it, once as stored."""
        mha = 2 * self.heads * self.head_dim * DTYPE.itemsize
        mla = (self.latent_dim + self.rope_dim) * DTYPE.itemsize
        quantized = self.latent_dim * FP8.itemsize + torch.float32.itemsize
        quantized += self.rope_dim * DTYPE.itemsize
        in_int8 = 2 * self.heads * (self.head_dim + torch.float32.itemsize)
        return {
            "MHA": 2 * mha,
            "MLA": 2 * mla,
            "quantised MLA": mla + quantized,
            "quantised MHA": mha + in_int8,
        }


@dataclasses.dataclass(frozen=True)
class Contender:
    """A pool under the name that the tables call it by.

    ``prepare`` is called before calls are timed, with whether a CUDA graph captures them.
    """

    name: str
    pool: Any
    prepare: Callable[[bool], None] = lambda _: None


type Inputs = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one kind of pool.

    Attributes:
      name: what the tables call it.
      kind: of the pool.
      all_layers: whether a call reads and writes every layer's rows; else those of one.
      inputs: makes the arguments of one call for n tokens.
      call: calls it: ``call(pool, *inputs)``.
      contenders: who is measured. Peers' moves are not where slots overlap: they race.
      own_call: how kvtorch is called if not like the others.
      most_tokens: beyond which a contender is left out.
    """

    name: str
    kind: str
    all_layers: bool
    inputs: Callable[[Sizes, np.random.Generator, int, int, str], Inputs]
    call: Callable[..., Any]
    contenders: tuple[str, ...]
    own_call: Callable[..., Any] | None = None
    most_tokens: dict[str, int] = dataclasses.field(default_factory=dict)

    def call_of(self, contender: Contender) -> Callable[..., Any]:
        """How this contender is called."""
        own = contender.name == "triton" and self.own_call is not None
        call: Any = self.own_call if own else self.call
        return lambda *inputs: call(contender.pool, *inputs)

    def bytes_moved(self, sizes: Sizes, num_tokens: int) -> int:
        """The bytes that a call has to read and to write."""
        layers = sizes.layers if self.all_layers else 1
        return num_tokens * layers * sizes.moved_bytes[self.kind]


def contenders(
    kind: str, sizes: Sizes, device: str, peers: dict[str, Peer], names: Iterable[str]
) -> list[Contender]:
    """Pools of one kind, for those of ``names`` that are there."""
    makers = _MAKERS[kind]
    found = []
    for name in names:
        project = name.partition(" ")[0]
        if project == "copy":
            copied = ContiguousCopy(sizes.num_slots, sizes.moved_bytes[kind] // 2, device)
            found.append(Contender(name, copied))
        elif project in ("triton", "torch"):
            found.append(Contender(name, makers[project](sizes, device)))
        elif project in peers:
            found.append(_of_peer(name, peers[project], makers[project], sizes, device))
    return found


def _of_peer(name: str, peer: Peer, make: Any, sizes: Sizes, device: str) -> Contender:
    def prepare(capturing: bool) -> None:
        peer.set_capturing(capturing)
        peer.set_dependent_launch(name.endswith(" pdl"))

    return Contender(name, make(peer, sizes, device), prepare)


def _own_mha(sizes: Sizes, device: str, pool: Any = MHATokenToKVPool, **options: Any) -> Any:
    """Also SGLang's, whose constructor is the same."""
    sizes_of_rows = (sizes.heads, sizes.head_dim, sizes.layers)
    return pool(sizes.num_slots, sizes.page_size, DTYPE, *sizes_of_rows, device, False, **options)


def _own_mla(sizes: Sizes, device: str, pool: Any = MLATokenToKVPool) -> Any:
    sizes_of_rows = (sizes.latent_dim, sizes.rope_dim, sizes.layers)
    return pool(sizes.num_slots, sizes.page_size, DTYPE, *sizes_of_rows, device, False)


def _tokenspeed_options(sizes: Sizes, device: str) -> dict[str, Any]:
    return {
        "size": sizes.num_slots,
        "dtype": DTYPE,
        "layer_num": sizes.layers,
        "device": device,
        "enable_memory_saver": False,
        "max_batch_size": 64,
        "max_context_len": 4096,
        "page_size": sizes.page_size,
        "rank": 0,
    }


def _tokenspeed_mha(peer: Peer, sizes: Sizes, device: str) -> Any:
    options = _tokenspeed_options(sizes, device)
    sizes_of_rows = {"head_num": sizes.heads, "head_dim": sizes.head_dim}
    return peer.mha(**sizes_of_rows, **options, enable_kv_cache_copy=True)


def _tokenspeed_mla(peer: Peer, sizes: Sizes, device: str) -> Any:
    return _mla_of(peer.mla, sizes, device, quant_method="")


def _mla_of(pool: Any, sizes: Sizes, device: str, **options: Any) -> Any:
    """TokenSpeed's, or ours of that name."""
    return pool(
        model_dtype=DTYPE,
        kv_lora_rank=sizes.latent_dim,
        qk_rope_head_dim=sizes.rope_dim,
        **_tokenspeed_options(sizes, device) | options,
    )


_QUANTIZED = {"quant_method": "per_token_head", "dtype": FP8}


def _indexed(*shapes: tuple[int, ...], sizes: Sizes, device: str) -> IndexPool:
    rows = sizes.num_slots + sizes.page_size
    shapes_of_planes = [(rows, *shape) for shape in shapes]
    return IndexPool(shapes_of_planes, sizes.layers, sizes.latent_dim, DTYPE, device)


_MAKERS: dict[str, dict[str, Callable[..., Any]]] = {
    "MHA": {
        "triton": _own_mha,
        "torch": lambda sizes, device: _indexed(
            *[(sizes.heads, sizes.head_dim)] * 2, sizes=sizes, device=device
        ),
        "sglang": lambda peer, sizes, device: _own_mha(sizes, device, peer.mha),
        "tokenspeed": _tokenspeed_mha,
    },
    "MLA": {
        "triton": _own_mla,
        "torch": lambda sizes, device: _indexed(
            (1, sizes.latent_dim + sizes.rope_dim), sizes=sizes, device=device
        ),
        "sglang": lambda peer, sizes, device: _own_mla(sizes, device, peer.mla),
        "tokenspeed": _tokenspeed_mla,
    },
    "quantised MLA": {
        "triton": lambda sizes, device: _mla_of(
            tokenspeed.MLATokenToKVPool, sizes, device, **_QUANTIZED
        ),
        "torch": lambda sizes, device: QuantizedLatentIndexPool(
            sizes.num_slots + sizes.page_size,
            sizes.layers,
            sizes.latent_dim,
            sizes.rope_dim,
            DTYPE,
            device,
        ),
        "tokenspeed": lambda peer, sizes, device: _mla_of(peer.mla, sizes, device, **_QUANTIZED),
    },
    "quantised MHA": {
        "triton": lambda sizes, device: _own_mha(
            sizes, device, QuantizedMHATokenToKVPool, quantization="int8_per_token_head"
        ),
        "torch": lambda sizes, device: QuantizedIndexPool(
            sizes.num_slots + sizes.page_size,
            sizes.layers,
            sizes.heads,
            sizes.head_dim,
            DTYPE,
            device,
        ),
    },
}
KINDS = tuple(_MAKERS)


def _slots(sizes: Sizes, rng: np.random.Generator, count: int) -> np.ndarray:
    return sizes.page_size + rng.permutation(sizes.num_slots)[:count]


def _layer_and_slots(sizes, rng, num_tokens, repetition, device) -> Inputs:
    layer = types.SimpleNamespace(layer_id=repetition % sizes.layers)
    return layer, torch.tensor(_slots(sizes, rng, num_tokens), device=device)


def _values(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=device)


def _keys_and_values(sizes, rng, num_tokens, repetition, device) -> Inputs:
    shape = (num_tokens, sizes.heads, sizes.head_dim)
    first = _layer_and_slots(sizes, rng, num_tokens, repetition, device)
    return *first, _values(shape, device), _values(shape, device)


def _latent_and_rope(sizes, rng, num_tokens, repetition, device) -> Inputs:
    first = _layer_and_slots(sizes, rng, num_tokens, repetition, device)
    widths = (sizes.latent_dim, sizes.rope_dim)
    return *first, *(_values((num_tokens, 1, width), device) for width in widths)


def _apart(sizes, rng, num_tokens, repetition, device) -> Inputs:
    slots = torch.tensor(_slots(sizes, rng, 2 * num_tokens), device=device)
    return slots[:num_tokens].clone(), slots[num_tokens:].clone()


def _one_in_fifty_overlaps(sizes, rng, num_tokens, repetition, device) -> Inputs:
    dst, src = _apart(sizes, rng, num_tokens, repetition, device)
    overlapping = max(1, num_tokens // 50)
    src[:overlapping] = dst[num_tokens - overlapping :]
    return dst, src


def _permuted(sizes, rng, num_tokens, repetition, device) -> Inputs:
    dst = _slots(sizes, rng, num_tokens)
    src = dst[rng.permutation(num_tokens)]
    return torch.tensor(dst, device=device), torch.tensor(src, device=device)


def _write(pool, layer, slots, k, v):
    pool.set_kv_buffer(layer, slots, k, v)


def _write_latent(pool, layer, slots, latent, rope):
    pool.set_mla_kv_buffer(layer, slots, latent, rope)


def _read_latent(pool, layer, slots):
    return pool.get_mla_kv_buffer(layer, slots)


def _read_quantized(pool, layer, slots):
    return pool.get_mla_kv_buffer(layer, slots, DTYPE)  # TokenSpeed's own default is fp8


def _read(pool, layer, slots):
    return pool.get_mha_kv_buffer(layer, slots)


def _move(pool, dst, src):
    pool.move_kv_cache(dst, src)


def _move_disjoint(pool, dst, src):
    pool.move_kv_cache(dst, src, disjoint=True)


OURS = ("triton", "torch")
OF_ONE_LAYER = (*OURS, "copy")
TOKENSPEED = ("tokenspeed", "tokenspeed pdl")

# Their moves hold all tokens in a program, which compiles the longer the more there are: 256 take 8
# seconds, 1 024 take 135 (Triton 3.6, one core), more than 8 192 are refused.
MOST_MOVED_BY_PEERS = {"sglang": 256, "tokenspeed": 256}

CASES = [
    Case("write K+V", "MHA", False, _keys_and_values, _write, (*OF_ONE_LAYER, "sglang")),
    Case(
        "move, disjoint",
        "MHA",
        True,
        _apart,
        _move,
        (*OURS, "sglang", "tokenspeed"),
        _move_disjoint,
        MOST_MOVED_BY_PEERS,
    ),
    Case("move, 1 in 50 overlaps", "MHA", True, _one_in_fifty_overlaps, _move, OURS),
    Case("move, permutation", "MHA", True, _permuted, _move, OURS),
    Case(
        "write latent+rope",
        "MLA",
        False,
        _latent_and_rope,
        _write_latent,
        (*OF_ONE_LAYER, "sglang", *TOKENSPEED),
    ),
    Case(
        "read latent+rope",
        "MLA",
        False,
        _layer_and_slots,
        _read_latent,
        (*OF_ONE_LAYER, *TOKENSPEED),
    ),
    # Theirs is of torch's operations, so that there is nothing to launch dependently.
    Case(
        "write quantised latent+rope",
        "quantised MLA",
        False,
        _latent_and_rope,
        _write_latent,
        (*OF_ONE_LAYER, "tokenspeed"),
    ),
    Case(
        "read quantised latent+rope",
        "quantised MLA",
        False,
        _layer_and_slots,
        _read_quantized,
        (*OF_ONE_LAYER, "tokenspeed"),
    ),
    Case(
        "write quantised K+V (int8)",
        "quantised MHA",
        False,
        _keys_and_values,
        _write,
        OF_ONE_LAYER,
    ),
    Case(
        "read quantised K+V (int8)",
        "quantised MHA",
        False,
        _layer_and_slots,
        _read,
        OF_ONE_LAYER,
    ),
]
