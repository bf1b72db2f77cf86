"""How many tokens fit into a memory budget? Standard library only."""

import argparse
import dataclasses
import json
import re
import reprlib
from collections.abc import Callable
from typing import Any

from kvjax import presets
from kvjax.errors import GeometryError
from kvjax.geometry import DTYPE_BYTES, QUANTIZATIONS, Geometry, LayerRange, fit

_UNIT_BYTES = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}


def parse_bytes(text: str) -> int:
    """Bytes of an amount such as ``80GiB`` (1024s) or ``80GB`` (1000s).

    Raises:
      ValueError: no unit, an unknown unit, less than one byte, or 8 EiB and more.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)", text)
    if match is None or match[2] not in _UNIT_BYTES:
        raise ValueError(
            f"{text!r} is not an amount of memory; write a number and one of "
            f"{', '.join(_UNIT_BYTES)}, as in 80GiB"
        )
    amount = float(match[1]) * _UNIT_BYTES[match[2]]  # infinite where there are too many digits
    if amount < 1:
        raise ValueError(f"{text!r} is less than one byte")
    if amount >= 2**63:
        raise ValueError(f"{reprlib.repr(text)} is 8 EiB of memory or more")
    return int(amount)


def format_bytes(amount: float) -> str:
    """An amount of memory for people: three digits and a unit of 1024s."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def stage_layers(layers: int, pp_size: int) -> list[LayerRange]:
    """The layers of each pipeline stage; the last ``layers % pp_size`` stages take one more.

    Source: SGLang ``get_pp_indices``. vLLM gives the extra layers to other stages, as many.

    Raises:
      GeometryError: more stages than layers.
    """
    if pp_size > layers:
        raise GeometryError(f"{layers=} cannot be split over {pp_size=} stages")
    base, extra = divmod(layers, pp_size)
    sizes = [base] * (pp_size - extra) + [base + 1] * extra
    starts = [sum(sizes[:stage]) for stage in range(pp_size)]
    return [LayerRange(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """One pool per pipeline stage, all with the same number of slots; tp ranks are alike."""

    model: presets.Model
    dtype: str
    quantization: str | None
    tp_size: int
    memory_bytes: int
    stages: tuple[Geometry, ...]

    @property
    def largest_stage(self) -> int:
        """The stage whose layers take the most bytes: it limits how many tokens fit."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].bytes_per_token)


def make_plan(
    model: presets.Model,
    dtype: str,
    page_size: int,
    tp_size: int,
    pp_size: int,
    memory_bytes: int,
    quantization: str | None = None,
) -> Plan:
    """The most tokens that every rank can hold in ``memory_bytes`` bytes of its own.

    Raises:
      GeometryError: heads or layers cannot be split so, not even one page fits, or a pool of that
        kind and dtype cannot be quantised so.
    """
    local = model.on_rank(tp_size)
    one_page = [
        dataclasses.replace(
            local.geometry(page_size, page_size, dtype, layers), quantization=quantization
        )
        for layers in stage_layers(model.layers, pp_size)
    ]
    # A token needs its slot on every stage, so the stage with the fewest decides for all.
    num_slots = min(fit(geometry, memory_bytes).num_slots for geometry in one_page)
    stages = tuple(dataclasses.replace(geometry, num_slots=num_slots) for geometry in one_page)
    return Plan(model, dtype, quantization, tp_size, memory_bytes, stages)


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data; sizes in bytes and tokens, per rank."""
    stage = plan.stages[plan.largest_stage]
    return {
        "model": plan.model.name,
        "dtype": plan.dtype,
        "quantization": plan.quantization,
        "page_size": stage.page_size,
        "tp_size": plan.tp_size,
        "pp_size": len(plan.stages),
        "memory_bytes_per_rank": plan.memory_bytes,
        "tokens": stage.num_slots,
        "pages": stage.num_pages,
        "largest_stage": plan.largest_stage,
        "stages": [
            {
                "first_layer": geometry.layers.start,
                "last_layer": geometry.layers.stop - 1,
                "row_shapes": {plane.name: list(plane.row_shape) for plane in geometry.planes},
                "bytes_per_token_per_layer": geometry.bytes_per_token_per_layer,
                "bytes_per_token": geometry.bytes_per_token,
                "bytes_per_page": geometry.bytes_per_page,
                "pool_bytes": geometry.bytes,
            }
            for geometry in plan.stages
        ],
        "notes": list(plan.model.notes),
    }


def to_text(plan: Plan) -> str:
    """The plan as a table for people."""
    stage = plan.stages[plan.largest_stage]
    ranks = plan.tp_size * len(plan.stages)
    quantization = "" if plan.quantization is None else f", quantised {plan.quantization}"
    lines = [
        f"{plan.model.name}: {plan.model.description}, {plan.dtype}{quantization}",
        f"{ranks} rank(s): tp {plan.tp_size} x pp {len(plan.stages)}, "
        f"{format_bytes(plan.memory_bytes)} of KV memory each",
        "",
        f"{'stage':>5}  {'layers':>8}  {'per token, layer':>16}  {'per token':>12}  {'pool':>10}",
    ]
    for number, geometry in enumerate(plan.stages):
        lines.append(
            f"{number:>5}  {geometry.layers!s:>8}  {geometry.bytes_per_token_per_layer:>14} B  "
            f"{geometry.bytes_per_token:>10} B  {format_bytes(geometry.bytes):>10}"
            + ("  <- largest" if len(plan.stages) > 1 and number == plan.largest_stage else "")
        )
    lines += [
        "",
        f"tokens that fit: {stage.num_slots:,} in {stage.num_pages:,} pages of "
        f"{stage.page_size} (and the padding page)",
    ]
    lines += [f"note: {note}" for note in plan.model.notes]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares ``kvjax plan``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"the path of a Hugging Face config.json, or one of {', '.join(presets.PRESETS)}",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPE_BYTES)
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="store rows in 8 bits, with a scale a token (latent) or a token and head (K and V); "
        "--dtype is then the model's",
    )
    parser.add_argument("--page-size", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--tp", type=int, default=1, metavar="RANKS", help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, metavar="STAGES", help="pipeline stages")
    parser.add_argument(
        "--memory", default="80GiB", metavar="SIZE", help="KV memory of one rank (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def prepare(args: argparse.Namespace) -> Callable[[], int]:
    """Plans as the arguments say; the result prints it.

    Raises:
      ValueError: a model, size or amount that makes no sense.
      GeometryError: a pool of that kind and dtype that cannot be quantised so.
      UnsupportedError: a model whose layers do not all keep KV rows of one shape.
    """
    for option, value in (("--tp", args.tp), ("--pp", args.pp), ("--page-size", args.page_size)):
        if value < 1:
            raise ValueError(f"{option} {value} must be at least 1")
    memory_bytes = parse_bytes(args.memory)
    model = presets.load(args.model)
    plan = make_plan(
        model,
        args.dtype,
        args.page_size,
        args.tp,
        args.pp,
        memory_bytes,
        quantization=args.quantization,
    )

    def work() -> int:
        print(json.dumps(to_json(plan), indent=2) if args.json else to_text(plan))
        return 0

    return work
