"""What is compiled: shapes, dtypes and layers."""

import dataclasses

import ml_dtypes  # noqa: F401  so that NumPy knows bfloat16 and fp8 by name

TRACED = "traced"

KV = (((2, 4), "float32"), ((1, 16), "bfloat16"))
MIXED = (((1, 8), "float16"), ((3, 4), "float32"), ((1, 16), "uint8"))
BYTES = (((2, 24), "uint8"), ((1, 16), "uint8"))
WIDE = (((8, 128), "bfloat16"), ((8, 128), "bfloat16"))  # 4096 bytes a token
LONG = (((1, 260), "float32"),)  # longer than the zeros that a block keeps, and no multiple of them
SCALED = (((1, 16), "uint8"), ((1, 1), "float32"), ((1, 8), "bfloat16"))
SCALED_LATENT = (((1, 512), "uint8"), ((1, 1), "float32"), ((1, 64), "bfloat16"))
SCALED_HEADS = (((8, 128), "int8"), ((8, 1), "float32"), ((3, 64), "int8"), ((3, 1), "float32"))
SEVEN_HEADS = (((7, 16), "uint8"), ((7, 1), "float32")) * 2  # 14 elements a token
ODD = [  # rows of which no bulk copy can be made
    (((1, 5), "float32"), ((1, 8), "float32")),
    (((3, 3), "bfloat16"),),
    (((1, 1), "uint8"),),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """Planes and sizes.

    Attributes:
      rows: the row shape and dtype of each plane.
      num_tokens: how many slots a call is given.
      layer: ``TRACED``, a number known when compiling, or ``None`` for all layers.
      constants: of modules of ``kvjax.ops``, replaced while compiling: ``(("row_copy.X", 1),)``.
      latent_dim: columns of the first part of a row, where rows have two.
      given: the dtypes of the parts of a row, where they are not those of planes.
    """

    rows: tuple
    num_tokens: int
    layer: str | int | None = TRACED
    constants: tuple = ()
    num_layers: int = 2
    first_slot: int = 4
    latent_dim: int | None = None
    given: tuple = ()

    @property
    def num_rows(self):
        return self.first_slot + self.num_tokens + 9

    def __str__(self):
        planes = "+".join(f"{dtype}{list(shape)}" for shape, dtype in self.rows)
        constants = "".join(f"-{name}={value}" for name, value in self.constants)
        given = f"{'+'.join(self.given)}-to-" if self.given else ""
        return f"{given}{planes}-n={self.num_tokens}-layer={self.layer}{constants}".replace(" ", "")


def of_all_layers(cases):
    """The same cases for operations that know no layer."""
    return [dataclasses.replace(case, layer=None) for case in cases]


MANY = [
    *(Case(KV, num_tokens) for num_tokens in (0, 1, 7, 17, 33, 64)),
    *(Case(KV, 7, layer) for layer in (None, 0, 1, -1, 2)),
    *(Case(rows, 7) for rows in (MIXED, BYTES, LONG, *ODD)),
    *(Case(ODD[0], num_tokens, None) for num_tokens in (0, 1, 33)),
]
# A block copies as many tokens as leave something to do for all blocks. With so few blocks that is
# several, and not every block is full.
FEW_BLOCKS = (("row_copy.NUM_BLOCKS", 4),)
ONE_BLOCK = (("row_copy.NUM_BLOCKS", 1),)
FEW = [
    *(Case(KV, num_tokens) for num_tokens in (0, 7)),
    *(Case(KV, 3, layer) for layer in (None, 1, -1)),
    Case(MIXED, 3),
    Case(KV, 9, None, FEW_BLOCKS),
    Case(SCALED, 9, None, FEW_BLOCKS),
    Case(ODD[1], 3),
]
FEWEST = [  # for operations that leave more of the work to the kernel they share
    Case(KV, 0),
    Case(KV, 7),
    Case(MIXED, 3, -1),
    Case(LONG, 3, None),
    Case(BYTES, 9, None, FEW_BLOCKS),
    Case(SCALED, 9, None, FEW_BLOCKS),
    Case(ODD[0], 3),
]
FOR_GPU = [  # few, because each takes most of a second to compile there
    *(Case(KV, num_tokens) for num_tokens in (0, 1, 64)),
    *(Case(KV, num_tokens, None) for num_tokens in (33, 2053)),
    Case(MIXED, 300),
    Case(BYTES, 1290, None),
    Case(LONG, 33, None),
    *(Case(SCALED_LATENT, num_tokens, None) for num_tokens in (1, 2053)),
    Case(SCALED_HEADS, 300),
    *(Case(rows, 33, None) for rows in (SCALED_HEADS, SEVEN_HEADS, *ODD)),
]
FEWEST_FOR_GPU = [
    Case(KV, 64),
    Case(BYTES, 1290, None),
    Case(LONG, 33, None),
    Case(SCALED_LATENT, 2053, None),
    Case(SCALED_HEADS, 64),
    Case(SEVEN_HEADS, 33, None),
    Case(ODD[1], 33, None),
]


def latent(latent_dim, rope_dim, dtype, *args):
    return Case((((1, latent_dim + rope_dim), dtype),), *args, latent_dim=latent_dim)


MANY_LATENT = [
    *(latent(64, 32, "float32", num_tokens) for num_tokens in (0, 1, 7, 17, 33, 64)),
    *(latent(64, 32, "float32", 7, layer) for layer in (0, 1, -1, 2)),
    latent(528, 128, "uint8", 7),  # WR1
    latent(100, 28, "float32", 7),
    latent(512, 64, "bfloat16", 7),
    latent(16, 0, "float32", 7),
    latent(16, 0, "float32", 0),
    latent(5, 3, "float16", 7),
    latent(1, 1, "uint8", 7),
]
FEW_LATENT = [
    latent(64, 32, "float32", 0),
    latent(64, 32, "float32", 3, -1),
    latent(528, 128, "uint8", 3),
    latent(100, 28, "float32", 3),
    latent(16, 0, "float32", 3),
    latent(16, 0, "float32", 0),
    latent(64, 32, "float32", 9, TRACED, FEW_BLOCKS),
]
LATENT_FOR_GPU = [
    latent(512, 64, "bfloat16", 64),
    latent(528, 128, "uint8", 33),
    latent(16, 0, "float32", 7),
    latent(16, 0, "float32", 0),
    latent(64, 32, "float32", 2053),
]


def quantized(latent_dim, rope_dim, dtype, given, *args):
    rows = ((1, latent_dim), "uint8"), ((1, 1), "float32"), ((1, rope_dim), dtype)
    return Case(rows, *args, given=given)


_F32, _BF16, _F16 = "float32", "bfloat16", "float16"
_EIGHT_A_BLOCK = (*ONE_BLOCK, ("latents._MAX_TOKENS", 8))
MANY_QUANTIZED = [
    *(quantized(64, 32, _BF16, (_F32, _F32), num_tokens) for num_tokens in (0, 1, 7, 33)),
    *(quantized(64, 32, _BF16, (_F32, _F32), 7, layer) for layer in (0, 1, -1, 2)),
    quantized(512, 64, _BF16, (_BF16, _BF16), 7),
    quantized(100, 28, _F32, (_F16, _BF16), 7),
    quantized(5, 3, _BF16, (_F32, _F16), 7),
    quantized(1, 1, _F32, (_F32, _F32), 7),
]
FEW_QUANTIZED = [
    quantized(64, 32, _BF16, (_F32, _F32), 0),
    quantized(64, 32, _F32, (_F32, _F32), 3, -1),
    quantized(512, 64, _BF16, (_BF16, _BF16), 5, TRACED, ONE_BLOCK),
    quantized(112, 48, _F32, (_F16, _BF16), 6, TRACED, ONE_BLOCK),
    quantized(272, 144, _BF16, (_F32, _F16), 3, TRACED, ONE_BLOCK),
    quantized(16, 8, _F32, (_F32, _F32), 11, TRACED, _EIGHT_A_BLOCK),  # warps have two rows each
]
QUANTIZED_FOR_GPU = [
    quantized(512, 64, _BF16, (_BF16, _BF16), 2053),
    quantized(512, 64, _F32, (_F32, _F16), 33),
    quantized(112, 48, _BF16, (_F16, _BF16), 64),
    quantized(512, 64, _BF16, (_BF16, _BF16), 0),
    quantized(16, 8, _BF16, (_BF16, _BF16), 2053),
    quantized(272, 144, _BF16, (_F32, _F16), 33, TRACED, _EIGHT_A_BLOCK),
    quantized(4096, 144, _F32, (_F32, _F32), 9, TRACED, ONE_BLOCK),
]
TO_LOWER_QUANTIZED = [case for case in FEW_QUANTIZED if case.num_tokens]


def quantized_kv(num_heads, head_dims, stored, given, *args):
    (k_dim, v_dim), scale = head_dims, ((num_heads, 1), "float32")
    rows = ((num_heads, k_dim), stored), scale, ((num_heads, v_dim), stored), scale
    return Case(rows, *args, given=given)


_INT8, _FP8 = "int8", "uint8"
MANY_QUANTIZED_KV = [
    *(
        quantized_kv(2, (16, 32), stored, (_F32, _F32), num_tokens)
        for num_tokens in (0, 1, 7, 33)
        for stored in (_INT8, _FP8)
    ),
    *(quantized_kv(3, (16, 16), _INT8, (_F32, _F32), 7, layer) for layer in (0, 1, -1, 2)),
    quantized_kv(8, (128, 128), _INT8, (_BF16, _BF16), 7),
    quantized_kv(4, (192, 128), _FP8, (_BF16, _F16), 7),
    quantized_kv(2, (32, 16), _INT8, ("float8_e4m3fn", "float8_e5m2"), 7),
    quantized_kv(1, (5, 3), _INT8, (_F32, _F16), 7),
    quantized_kv(1, (1, 1), _FP8, (_F32, _F32), 7),
]
FEW_QUANTIZED_KV = [
    quantized_kv(2, (16, 32), _INT8, (_F32, _F32), 0),
    quantized_kv(3, (16, 32), _INT8, (_F32, _F32), 3, -1),
    quantized_kv(4, (128, 80), _FP8, (_BF16, _F16), 5, TRACED, ONE_BLOCK),
    quantized_kv(8, (64, 64), _INT8, ("float8_e4m3fn", _BF16), 3),
    quantized_kv(10, (256, 16), _INT8, (_F32, _BF16), 2),  # more heads of K than are done at once
    quantized_kv(2, (16, 32), _FP8, (_F32, _F32), 3, TRACED, ONE_BLOCK),
]
QUANTIZED_KV_FOR_GPU = [
    *(
        quantized_kv(8, (128, 128), stored, (_BF16, _BF16), num_tokens)
        for stored, num_tokens in ((_INT8, 2053), (_FP8, 2053), (_INT8, 1), (_FP8, 0))
    ),
    quantized_kv(2, (192, 128), _INT8, (_F32, _F16), 33),
    quantized_kv(1, (256, 80), _FP8, (_F16, _F32), 33),
    quantized_kv(128, (128, 128), _INT8, (_F32, _F32), 9),
    quantized_kv(6, (16, 48), _FP8, ("float8_e5m2", _BF16), 64),
]
TO_LOWER_QUANTIZED_KV = [case for case in QUANTIZED_KV_FOR_GPU if case.num_tokens]
