"""The figures as a table, a file to keep, and a plot."""

import dataclasses
import datetime
import json
import pathlib
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import Any

PANELS_IN_A_ROW = 5

LABELS: dict[str, str] = {
    "mosaic_gpu": "kvjax, Mosaic GPU",
    "reference": "XLA",
    "plain": "XLA",
    "triton": "kvtorch, Triton",
    "torch": "torch's index operations",
    "sglang": "SGLang",
    "copy": "copy_ of as many bytes in one piece",
    "tokenspeed": "TokenSpeed",
    "tokenspeed pdl": "TokenSpeed, dependent launch",
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measurement; seconds are of one call.

    ``device_seconds`` is ``None`` where only the host was measured, ``bytes_moved`` 0 where moving
    bytes is not what the operation is for.
    """

    case: str
    num_tokens: int
    implementation: str
    device_seconds: float | None
    eager_seconds: float
    bytes_moved: int
    copy_bandwidth: float

    @property
    def share(self) -> float | None:
        """Achieved bytes a second, as a share of those of a device copy in the same run."""
        if not self.bytes_moved or self.device_seconds is None:
            return None
        return self.bytes_moved / self.device_seconds / self.copy_bandwidth


def conditions(device: str, copy_bandwidth: float, versions: dict[str, str]) -> dict[str, str]:
    """What somebody needs to repeat the run."""
    return {
        "device": device,
        "device copy": f"{copy_bandwidth / 1e9:.0f} GB/s, bytes read and written",
        **versions,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    }


HEADER = ["operation", "tokens", "implementation", "device us", "GB/s", "of copy", "eager us"]


def row(figure: Figure) -> list[str]:
    """The figure's cells, as ``HEADER`` names them."""
    seconds, share = figure.device_seconds, figure.share
    return [
        figure.case,
        f"{figure.num_tokens}",
        figure.implementation,
        "" if seconds is None else f"{seconds * 1e6:.2f}",
        "" if share is None else f"{share * figure.copy_bandwidth / 1e9:.0f}",
        "" if share is None else f"{share:.1%}",
        f"{figure.eager_seconds * 1e6:.1f}",
    ]


def save(
    folder: pathlib.Path,
    figures: list[Figure],
    about: dict[str, str],
    remarks: Sequence[str] = (),
) -> list[pathlib.Path]:
    """Writes ``figures.md`` to read, ``figures.json`` to compute with, ``figures.png`` to see.

    Args:
      folder: made if it is not there.
      figures: in the order of the table.
      about: the conditions.
      remarks: lines below the table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", _line(HEADER), _line(["---"] * len(HEADER))]
    lines += [_line(row(figure)) for figure in figures]
    lines += ["", *(f"- {remark}" for remark in remarks)] if remarks else []
    markdown, data, image = (folder / f"figures.{end}" for end in ("md", "json", "png"))
    markdown.write_text("\n".join(lines) + "\n")
    data.write_text(json.dumps([about, *map(dataclasses.asdict, figures)], indent=1) + "\n")
    plotted = [figure for figure in figures if figure.share is not None]
    if not plotted:
        return [markdown, data]
    _plot(image, plotted, about)
    return [markdown, data, image]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _label(figure: Figure) -> str:
    return LABELS.get(figure.implementation, figure.implementation)


def _plot(path: pathlib.Path, figures: list[Figure], about: dict[str, str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    cases = list(dict.fromkeys(figure.case for figure in figures))
    labels = list(dict.fromkeys(_label(figure) for figure in figures))
    columns = min(len(cases), PANELS_IN_A_ROW)
    rows = -(-len(cases) // columns)
    figure, grid = pyplot.subplots(
        rows,
        columns,
        figsize=(3 * columns, 3 * rows + 0.8),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    axes = list(grid.flat)
    for axis in axes[len(cases) :]:
        axis.set_visible(False)
    lines: dict[str, Any] = {}
    # Rows of a few tokens stay in caches, which are faster than a copy.
    highest = max(1, *(1.05 * (f.share or 0) for f in figures))
    for axis, case in zip(axes, cases, strict=False):
        for color, label in enumerate(labels):  # the same color everywhere
            points = [f for f in figures if (f.case, _label(f)) == (case, label)]
            if points:
                x, y = [f.num_tokens for f in points], [f.share for f in points]
                (lines[label],) = axis.plot(x, y, "o-", color=f"C{color}")
        axis.set(title=case, xlabel="tokens a call", ylim=(0, highest))
        axis.set_xscale("log", base=2)
        axis.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        axis.grid(alpha=0.3)
    figure.supylabel("share of the device-copy bandwidth")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
    figure.suptitle(f"{about['device']}, {about['device copy']}")
    pyplot.savefig(path, dpi=110)
    pyplot.close(figure)
