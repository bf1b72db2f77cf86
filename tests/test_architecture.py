"""What no module may do: who imports whom, length, environment, deprecated kernel languages.

The tables are the rules. Each rule is also given a source that breaks it, so that it can fail.
"""

import ast
import dataclasses
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400

_BASE = "kvjax.checks_mode kvjax.dispatch kvjax.errors jax jaxtyping numpy"
_SHARED = "kvjax.checks_mode kvjax.dispatch kvjax.errors kvjax.geometry"

# module or folder: what it may import beside the standard library and its own row.
MAY_IMPORT = {
    # Standard library only, so that planning needs no device and importing costs nothing.
    "kvjax.__init__": "",
    "kvjax.errors": "",
    "kvjax.checks_mode": "kvjax.errors",
    "kvjax.dispatch": "kvjax.errors",
    "kvjax.geometry": "kvjax.errors",
    "kvjax.presets": "kvjax.errors kvjax.geometry",
    "kvjax.plan": "kvjax.errors kvjax.geometry kvjax.presets",
    # Arrays and positions, never a pool.
    "kvjax.slots": _BASE,
    "kvjax.ops": f"{_BASE} kvjax.slots",
    # Who owns a slot, never how many bytes it has.
    "kvjax.free_list": f"{_BASE} kvjax.slots",
    "kvjax.allocators": f"{_BASE} kvjax.slots kvjax.ops kvjax.free_list",
    "kvjax.request_table": f"{_BASE} kvjax.slots kvjax.ops kvjax.free_list",
    # Pools are geometry and calls of operations; host and transfer know pools.
    "kvjax.pools": f"{_BASE} kvjax.slots kvjax.ops kvjax.geometry",
    "kvjax.host": f"{_BASE} kvjax.slots kvjax.geometry kvjax.pools",
    "kvjax.transfer": f"{_BASE} kvjax.slots kvjax.ops kvjax.geometry kvjax.pools kvjax.host",
    # Programs.
    "kvjax.replay": f"{_BASE} kvjax matplotlib ml_dtypes",
    # The replay compares the two frameworks, and does so without torch where there is none.
    "kvjax.replay.torch_plane": "kvjax kvtorch torch numpy",
    "kvjax.replay.torch_content": "kvjax.geometry kvjax.replay.content torch ml_dtypes",
    "kvjax.__main__": "kvjax",
    # The torch face: what is the same in both frameworks, and one bridge.
    "kvtorch": f"{_SHARED} torch triton numpy",
    "kvtorch.interop": "kvjax kvtorch jax torch numpy",
}

MAY_READ_ENVIRONMENT = {  # once each: KVJAX_CHECKS, and the variables that SGLang's users know
    "kvjax.checks_mode",
    "kvtorch.base_allocator",
    "kvtorch.pools.memory",
}
NOT_AN_OPERATIONS_BUSINESS = {"pool", "geometry", "layer_id", "rank", "tp_rank", "pp_rank"}


@dataclasses.dataclass(frozen=True)
class Module:
    name: str  # as in "kvjax.ops.__init__"
    source: str

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.source)))

    @property
    def imports(self) -> Iterator[str]:
        """What is imported, with the name: ``from jax import numpy`` gives ``jax.numpy``."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = "." * node.level + (node.module or "")
                yield from (f"{origin}.{alias.name}" for alias in node.names)

    @property
    def words(self) -> Iterator[str]:
        """Every name that is read, set, passed, or looked up as an attribute."""
        for node in self.nodes:
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                    yield word


def is_within(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + ".")


def imports_only_what_its_row_allows(module: Module) -> Iterator[str]:
    rows = [row for row in MAY_IMPORT if is_within(module.name, row)]
    if not rows:
        yield "has no row in MAY_IMPORT"
        return
    row = max(rows, key=len)
    allowed = [row, *MAY_IMPORT[row].split()]
    for name in module.imports:
        if name.partition(".")[0] in sys.stdlib_module_names:
            continue
        if not any(is_within(name, allow) for allow in allowed):
            yield f"imports {name}, which row {row!r} does not allow"


def says_what_it_is_for(module: Module) -> Iterator[str]:
    if module.source.strip():  # an empty __init__.py has nothing to say
        first_line, *_ = (ast.get_docstring(ast.parse(module.source)) or "").splitlines() or [""]
        if not first_line.endswith((".", "?")):
            yield f"its first line is no sentence: {first_line!r}"


def is_short(module: Module) -> Iterator[str]:
    lines = len(module.source.splitlines())
    if lines > MAX_LINES:
        yield f"has {lines} lines, more than {MAX_LINES}: split it by contract"


def reads_no_environment(module: Module) -> Iterator[str]:
    reads = [word for word in module.words if word in {"environ", "environb", "getenv"}]
    reads += [name for name in module.imports if name in {"os.environ", "os.getenv"}]
    if len(reads) > (module.name in MAY_READ_ENVIRONMENT):
        yield "reads the environment; behaviour is chosen by arguments"


def is_finished(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.source.splitlines(), start=1):
        if re.search(r"\b(TODO|FIXME|XXX)\b", line):
            yield f"line {number} is unfinished: {line.strip()}"


def writes_kernels_for_mosaic_gpu(module: Module) -> Iterator[str]:
    """Pallas' Triton backend is deprecated since JAX 0.11, and pallas_call for Mosaic GPU too."""
    if any(is_within(name, "jax.experimental.pallas.triton") for name in module.imports):
        yield "imports Pallas' Triton backend; use jax.experimental.pallas.mosaic_gpu"
    if "pallas_call" in {*module.words, *(name.split(".")[-1] for name in module.imports)}:
        yield "uses pallas_call; use plgpu.kernel"


def knows_arrays_only(module: Module) -> Iterator[str]:
    if is_within(module.name, "kvjax.ops") or is_within(module.name, "kvtorch.ops"):
        for word in sorted(NOT_AN_OPERATIONS_BUSINESS.intersection(module.words)):
            yield f"is an operation, but knows a {word}"


RULES = [
    imports_only_what_its_row_allows,
    says_what_it_is_for,
    is_short,
    reads_no_environment,
    is_finished,
    writes_kernels_for_mosaic_gpu,
    knows_arrays_only,
]

BREAKS = [  # rule, module, a source that breaks it
    (imports_only_what_its_row_allows, "kvjax.geometry", "import numpy"),
    (imports_only_what_its_row_allows, "kvjax.dispatch", "from kvjax.geometry import fit"),
    (imports_only_what_its_row_allows, "kvjax.ops.move_rows", "from kvjax import create"),
    (imports_only_what_its_row_allows, "kvjax.ops.move_rows", "from kvjax.pools import mha"),
    (imports_only_what_its_row_allows, "kvjax.ops.move_rows", "from ..pools import mha"),
    (imports_only_what_its_row_allows, "kvjax.ops.move_rows", "import kvjax"),
    (imports_only_what_its_row_allows, "kvjax.allocators", "def f():\n  import kvjax.pools.mla"),
    (imports_only_what_its_row_allows, "kvjax.request_table", "import kvjax.geometry"),
    (imports_only_what_its_row_allows, "kvjax.pools.mha", "from kvjax import transfer"),
    (imports_only_what_its_row_allows, "kvjax.replay.report", "import torch"),
    (imports_only_what_its_row_allows, "kvjax.no_such_module", "import math"),
    (imports_only_what_its_row_allows, "kvtorch.pools.mha", "import jax"),
    (imports_only_what_its_row_allows, "kvtorch.pools.mha", "from kvjax.pools import mha"),
    (says_what_it_is_for, "kvjax.host", "import math"),
    (says_what_it_is_for, "kvjax.host", '"""Pinned memory"""'),
    (is_short, "kvjax.host", "pass\n" * (MAX_LINES + 1)),
    (reads_no_environment, "kvjax.host", "import os\nos.environ.get('PATH')"),
    (reads_no_environment, "kvjax.host", "from os import getenv"),
    (reads_no_environment, "kvjax.checks_mode", "os.getenv('KVJAX_CHECKS')\nos.environ['PATH']"),
    (is_finished, "kvjax.host", "pass  # " + "TODO: the rest"),
    (writes_kernels_for_mosaic_gpu, "kvjax.ops.a", "import jax.experimental.pallas.triton as plt"),
    (writes_kernels_for_mosaic_gpu, "kvjax.ops.a", "from jax.experimental.pallas import triton"),
    (writes_kernels_for_mosaic_gpu, "kvjax.ops.a", "pl.pallas_call(kernel)"),
    (knows_arrays_only, "kvjax.ops.move_rows", "def reference(plane, layer_id): ..."),
    (knows_arrays_only, "kvjax.ops.move_rows", "pool.planes"),
    (knows_arrays_only, "kvtorch.ops.move_rows", "pool.planes"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module(rule):
    paths = sorted(path for top in ("kvjax", "kvtorch") for path in (ROOT / top).rglob("*.py"))
    complaints = []
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        complaints += [f"{name} {what}" for what in rule(Module(name, path.read_text()))]
    assert paths and not complaints, "\n".join(complaints)


@pytest.mark.parametrize("rule, name, source", BREAKS)
def test_the_rule_can_fail(rule, name, source):
    assert list(rule(Module(name, source)))


def test_every_rule_is_shown_to_fail():
    assert {rule for rule, _, _ in BREAKS} == set(RULES)


@pytest.mark.parametrize(
    "name, source",
    [
        ("kvjax.ops.__init__", ""),
        ("kvjax.ops.a", '"""Copies."""\nimport math, jax.numpy\nfrom kvjax.ops import b'),
        ("kvjax.pools.mha", '"""Pools."""\nfrom kvjax import geometry\ndef f(layer_id): ...'),
        ("kvjax.checks_mode", '"""Checks?"""\nimport os\nos.environ.get("KVJAX_CHECKS")'),
        ("kvtorch.interop", '"""The bridge."""\nimport jax, torch\nfrom kvjax.pools import mla'),
        ("kvjax.host", '"""Memory."""' + "\n" * (MAX_LINES - 1)),
    ],
)
def test_a_module_within_the_rules_passes(name, source):
    assert [list(rule(Module(name, source))) for rule in RULES] == [[]] * len(RULES)
