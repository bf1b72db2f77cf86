"""What is measured: each operation, on pools of a size that leaves no cache out of account."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import MHAGeometry, MLAGeometry, Pool, mha, mla, move
from kvjax.geometry import Geometry
from kvjax.ops import assign_slots

LAYERS = 32
SLOTS = 65536 - 16
MHA = MHAGeometry(SLOTS, 16, LAYERS, 8, 128, "bfloat16")  # 2 KB a row of K and of V
MLA = MLAGeometry(SLOTS, 16, LAYERS, 512, 64, "bfloat16")  # 1 152 bytes a row
QUANTIZED = dataclasses.replace(MLA, quantization="per_token_head")  # 644 bytes a row
INT8 = dataclasses.replace(MHA, quantization="int8_per_token_head")  # 1 056 bytes a row of each
FP8 = dataclasses.replace(MHA, quantization="fp8_per_token_head")


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one kind of pool.

    Attributes:
      name: what the tables call it.
      geometry: of the pool.
      layers: in how many layers one call reads and writes each token's row.
      inputs: makes the arguments of one call for n tokens; every call gets its own, so that no
        input is in a cache.
      call: calls it: ``call(pool, *inputs, implementation=...)`` returns what it computed, and the
        pool to go on with.
      implementations: those to set side by side.
    """

    name: str
    geometry: Geometry
    layers: int
    inputs: Callable[[np.random.Generator, int, int], tuple[Any, ...]]
    call: Callable[..., tuple[Any, Pool]]
    implementations: tuple[str, ...] = ("mosaic_gpu", "reference")

    def bytes_moved(self, num_tokens: int) -> int:
        """The bytes that a call has to read and to write.

        Of each row those that it is stored in, and those that the model has: other ones, and more,
        where the pool is quantised.
        """
        stored = model = self.geometry
        if isinstance(stored, MHAGeometry | MLAGeometry):
            model = dataclasses.replace(stored, quantization=None)
        row_bytes = stored.bytes_per_token_per_layer + model.bytes_per_token_per_layer
        return num_tokens * self.layers * row_bytes


def _slots(rng: np.random.Generator, count: int) -> jax.Array:
    return jnp.asarray(16 + rng.permutation(SLOTS)[:count].astype(np.int32))


def _values(shape: tuple[int, ...], repetition: int) -> jax.Array:
    return jax.random.normal(jax.random.key(repetition), shape, jnp.bfloat16)


def _layer_and_slots(rng, num_tokens, repetition):
    return jnp.int32(repetition % LAYERS), _slots(rng, num_tokens)


def _keys_and_values(rng, num_tokens, repetition):
    keys = _values((num_tokens, 8, 128), repetition)
    return *_layer_and_slots(rng, num_tokens, repetition), keys, -keys


def _latent_and_rope(rng, num_tokens, repetition):
    latent = _values((num_tokens, 1, 512), repetition)
    return *_layer_and_slots(rng, num_tokens, repetition), latent, latent[..., :64]


def _apart(rng, num_tokens, _):
    slots = _slots(rng, 2 * num_tokens)
    return slots[:num_tokens], slots[num_tokens:]


def _one_in_fifty_overlaps(rng, num_tokens, _):
    dst, src = map(np.array, _apart(rng, num_tokens, _))
    overlapping = max(1, num_tokens // 50)
    src[:overlapping] = dst[num_tokens - overlapping :]
    return jnp.asarray(dst), jnp.asarray(src)


def _permuted(rng, num_tokens, _):
    dst = _slots(rng, num_tokens)
    return dst, dst[rng.permutation(num_tokens)]


def _extend(rng, num_tokens, _):
    """Sequences of 64 tokens that grow by as many, in pages of 16."""
    extend_lens = np.full(max(1, num_tokens // 64), min(64, num_tokens), np.int32)
    new_pages = 1 + rng.permutation(SLOTS // 16)[: num_tokens // 16 + extend_lens.size]
    starts = np.cumsum(extend_lens) - extend_lens
    last_slots = np.full(extend_lens.size, 31)
    arrays = (np.full(extend_lens.size, 64), extend_lens, last_slots, starts, new_pages)
    return *(jnp.asarray(array, jnp.int32) for array in arrays), num_tokens


def _in_place(operation: Callable[..., Pool], **options: Any) -> Callable[..., tuple[Any, Pool]]:
    def call(pool, *inputs, implementation):
        return None, operation(pool, *inputs, **options, implementation=implementation)

    return call


def _reading(operation: Callable[..., Any]) -> Callable[..., tuple[Any, Pool]]:
    def call(pool, *inputs, implementation):
        return operation(pool, *inputs, implementation=implementation), pool

    return call


@functools.partial(jax.jit, donate_argnums=0)
def _plain_move(pool, dst, src):
    """What one would write without kvjax; the reference goes layer by layer instead."""
    planes = tuple(plane.at[:, dst].set(plane[:, src]) for plane in pool.planes)
    return dataclasses.replace(pool, planes=planes)


def _moving(**options: Any) -> Callable[..., tuple[Any, Pool]]:
    def call(pool, dst, src, *, implementation):
        if implementation == "plain":
            return None, _plain_move(pool, dst, src)
        return None, move(pool, dst, src, **options, implementation=implementation)

    return call


@functools.partial(jax.jit, static_argnames="num_tokens")
def _assigned(*inputs, num_tokens):
    return assign_slots.reference(*inputs, page_size=16, num_tokens=num_tokens)


def _assign(pool, *inputs, implementation):
    return _assigned(*inputs[:-1], num_tokens=inputs[-1]), pool


MOVES = ("mosaic_gpu", "plain")
CASES = [
    Case("write K+V", MHA, 1, _keys_and_values, _in_place(mha.write)),
    Case("read K+V", MHA, 1, _layer_and_slots, _reading(mha.read)),
    Case("write latent+rope", MLA, 1, _latent_and_rope, _in_place(mla.write)),
    Case("read latent+rope", MLA, 1, _layer_and_slots, _reading(mla.read)),
    Case("write quantised latent+rope", QUANTIZED, 1, _latent_and_rope, _in_place(mla.write)),
    Case("read quantised latent+rope", QUANTIZED, 1, _layer_and_slots, _reading(mla.read)),
    Case("write quantised K+V (int8)", INT8, 1, _keys_and_values, _in_place(mha.write)),
    Case("read quantised K+V (int8)", INT8, 1, _layer_and_slots, _reading(mha.read)),
    Case("write quantised K+V (fp8)", FP8, 1, _keys_and_values, _in_place(mha.write)),
    Case("read quantised K+V (fp8)", FP8, 1, _layer_and_slots, _reading(mha.read)),
    Case("move, disjoint", MHA, LAYERS, _apart, _moving(disjoint=True), MOVES),
    Case("move, 1 in 50 overlaps", MHA, LAYERS, _one_in_fifty_overlaps, _moving(), MOVES),
    Case("move, permutation", MHA, LAYERS, _permuted, _moving(), MOVES),
    Case("assign slots", MHA, 0, _extend, _assign, ("reference",)),
]
