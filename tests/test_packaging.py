"""What a user meets first: imports cost nothing, every public name is there, the README runs."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvjax
import kvtorch

ROOT = Path(__file__).parents[1]
HEAVY = {"jax", "jaxlib", "numpy", "torch"}


def loaded_by(statement: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after a statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return HEAVY.intersection(run.stdout.split())


@pytest.mark.parametrize(
    "module", ["", ".errors", ".dispatch", ".checks_mode", ".geometry", ".plan"]
)
def test_importing_it_loads_nothing_heavy(module):
    assert loaded_by(f"import kvjax{module}") == set()


def test_the_light_names_load_nothing_heavy():
    assert loaded_by("from kvjax import MHAGeometry, GeometryError, LayerRange, checks") == set()


def test_loading_something_heavy_would_be_noticed():
    assert "numpy" in loaded_by("import numpy")


@pytest.mark.parametrize("name", kvjax.__all__)
def test_every_public_name_is_there(name):
    value = getattr(kvjax, name)
    home = getattr(value, "__module__", value.__name__)
    assert home.startswith("kvjax.")
    assert name in dir(kvjax)


@pytest.mark.parametrize("package", [kvjax, kvtorch], ids=["kvjax", "kvtorch"])
def test_type_checkers_are_told_the_same_names(package):
    stub = ast.parse((ROOT / package.__name__ / "__init__.pyi").read_text())
    told = {node.names[0].asname: node.module for node in stub.body}
    assert told == package._HOMES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'kvjax' has no attribute 'no_such_name'"):
        _ = kvjax.no_such_name


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run_in_order(examples: list[str]) -> None:
    assert examples
    namespace = {}  # an example may go on where the one before it stopped
    for example in examples:
        exec(compile(example, "README.md", "exec"), namespace)


def test_the_readmes_examples_run_without_torch():
    run_in_order([example for example in examples() if "torch" not in example])


def test_the_readmes_examples_run():
    torch = pytest.importorskip("torch", reason="torch: not installed")
    jax = pytest.importorskip("jax")
    if torch.cuda.is_available() != (jax.default_backend() == "gpu"):
        pytest.skip("gpu: only one of JAX and torch sees it")
    run_in_order(examples())


def test_the_changelog_is_of_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version
