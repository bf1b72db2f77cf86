"""Measures kvjax or, with ``torch`` as the first word, kvtorch: ``python -m benchmarks --help``."""

import importlib
import sys

SIDES = ("jax", "torch")


def main(words: list[str]) -> int:
    """Runs one side; each imports only its own framework."""
    side = "jax"
    if words and words[0] in SIDES:
        side, *words = words
    return importlib.import_module(f"benchmarks.{side}_side").main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
