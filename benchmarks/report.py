"""The figures as a table, a file to keep, and a plot."""

import dataclasses
import datetime
import json
import pathlib
import platform
import shlex
import sys
from collections.abc import Iterable

import jax
import jaxlib


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measurement; seconds are of one call."""

    case: str
    num_tokens: int
    implementation: str
    device_seconds: float
    eager_seconds: float
    bytes_moved: int
    copy_bandwidth: float

    @property
    def share(self) -> float:
        """Achieved bytes a second, as a share of those of a device copy in the same run."""
        return self.bytes_moved / self.device_seconds / self.copy_bandwidth


def conditions(copy_bandwidth: float) -> dict[str, str]:
    """What somebody needs to repeat the run."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "device copy": f"{copy_bandwidth / 1e9:.0f} GB/s, bytes read and written",
        "jax": f"{jax.__version__}, jaxlib {jaxlib.__version__}",
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    }


HEADER = ["operation", "tokens", "implementation", "device us", "GB/s", "of copy", "eager us"]


def row(figure: Figure) -> list[str]:
    """The figure's cells, as ``HEADER`` names them."""
    moves = figure.bytes_moved > 0
    return [
        figure.case,
        f"{figure.num_tokens}",
        figure.implementation,
        f"{figure.device_seconds * 1e6:.2f}",
        f"{figure.bytes_moved / figure.device_seconds / 1e9:.0f}" if moves else "",
        f"{figure.share:.1%}" if moves else "",
        f"{figure.eager_seconds * 1e6:.0f}",
    ]


def save(folder: pathlib.Path, figures: list[Figure], about: dict[str, str]) -> list[pathlib.Path]:
    """Writes ``figures.md`` to read, ``figures.json`` to compute with, ``figures.png`` to see."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", _line(HEADER), _line(["---"] * len(HEADER))]
    lines += [_line(row(figure)) for figure in figures]
    markdown, data, image = (folder / f"figures.{end}" for end in ("md", "json", "png"))
    markdown.write_text("\n".join(lines) + "\n")
    data.write_text(json.dumps([about, *map(dataclasses.asdict, figures)], indent=1) + "\n")
    _plot(image, figures, about)
    return [markdown, data, image]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plot(path: pathlib.Path, figures: list[Figure], about: dict[str, str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(figure.case for figure in figures if figure.bytes_moved))
    _, axes = pyplot.subplots(
        1, len(cases), figsize=(3 * len(cases), 3.4), sharey=True, layout="constrained"
    )
    for axis, case in zip(axes, cases, strict=True):
        for name, label in (("mosaic_gpu", "kvjax, Mosaic GPU"), ("reference", "XLA")):
            points = [f for f in figures if (f.case, f.implementation) == (case, name)]
            axis.plot([f.num_tokens for f in points], [f.share for f in points], "o-", label=label)
        axis.set(title=case, xscale="log", xlabel="tokens a call", ylim=(0, 1))
        axis.set_xscale("log", base=2)
        axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of the device-copy bandwidth")
    axes[0].legend()
    pyplot.suptitle(f"{about['device']}, {about['device copy']}")
    pyplot.savefig(path, dpi=110)
