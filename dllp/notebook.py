"""Display of a run where it was started from Python: its progress, and its result as text or as a small page.

A terminal has one line that is written over, a notebook a bar; files and pipes have nothing. IPython is looked for
among the modules that are loaded already, and never imported before: a script does not pay for it.
"""

from __future__ import annotations

import html
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dllp.config import COUNTED, Config
from dllp.records import EpochRecord

PAUSE = 0.5
"""Seconds between two updates within an epoch."""
BAR = "#0072B2"


def in_notebook() -> bool:
    """True in a Jupyter kernel; a terminal's IPython is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def display() -> Live | None:
    """Display of a training as it runs: a bar in a notebook, a line on a terminal, or nothing."""
    if in_notebook():
        return Bar()
    return Live() if sys.stderr is not None and sys.stderr.isatty() else None


class Live:
    """A line on a terminal that follows one training, written over again and again."""

    def __init__(self) -> None:
        self.began, self.shown, self.first = time.monotonic(), 0.0, 0

    def step(self, done: int, total: int, config: Config, last: EpochRecord | None) -> None:
        """After each step, of which `done` of `total` are taken; `last` is the record of the last whole epoch."""
        now = time.monotonic()
        self.first = self.first or done  # a run that goes on does not start at 1
        if now - self.shown < PAUSE and done < total:
            return
        self.shown = now
        rate = (done - self.first + 1) / max(now - self.began, 1e-9)
        epoch = min(done * config.epochs // total + 1, config.epochs)
        parts = [f"epoch {epoch}/{config.epochs}", f"{rate:.1f} steps/s", f"{(total - done) / rate:.0f} s left"]
        if last is not None:
            target = config.budget[1]
            goal = f" (target {target:g})" if target is not None else ""
            parts += [f"loss {fmean(last.loss):.4f}", f"cost {fmean(last.cost):.3f}{goal}"]
            if last.validation_accuracy:
                parts.append(f"validation {100 * fmean(last.validation_accuracy):.2f}%")
        self.show(done, total, " · ".join(parts))

    def show(self, done: int, total: int, text: str) -> None:
        """Write over the line; it stays when the last step is done."""
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{text[:width]}", end="\n" if done == total else "", file=sys.stderr, flush=True)


class Bar(Live):
    """A bar in a notebook, with the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        from IPython.display import HTML, display

        self.html = HTML
        self.handle: Any = display(HTML(self._markup(0, 1, "starting")), display_id=True)

    def show(self, done: int, total: int, text: str) -> None:
        self.handle.update(self.html(self._markup(done, total, text)))

    def _markup(self, done: int, total: int, text: str) -> str:
        return f'<progress value="{done}" max="{total}" style="vertical-align:middle"></progress> {html.escape(text)}'


def lines(
    config: Config, dense: Mapping[str, Any], sizes: Sequence[Mapping[str, Any]], history: Sequence[Mapping[str, Any]]
) -> str:
    """A result as a few lines of text."""
    n = len(sizes)
    shares = [f"{_share(size, dense, 'macs')} of the FLOPs, {_share(size, dense, 'params')} of the parameters"
              for size in sizes]  # fmt: skip
    counted, keep = config.budget
    cut = any(size != dense for size in sizes)
    budget = f" (budget: {100 * keep:g}% of the {COUNTED[counted]})" if keep and cut else ""
    found = [f"dllp.Result: {n} {'pruned' if cut else 'whole'} network{'s' * (n > 1)}{budget}"]
    found += [f"  particle {i + 1}: {share}" for i, share in enumerate(shares[:4])] + ["  ..."] * (n > 4)
    if history and history[-1].get("loss"):
        last = history[-1]
        text = f"  {len(history)} epochs, training loss {fmean(last['loss']):.4f}"
        if last.get("validation_accuracy"):
            text += f", validation accuracy {100 * fmean(last['validation_accuracy']):.2f}%"
        found.append(text)
    found.append(
        "next: .evaluate(test_data), .speed(), .export('network.onnx'), .report('report.html'), .save('folder')"
    )
    return "\n".join(found)


def summary(
    config: Config, dense: Mapping[str, Any], sizes: Sequence[Mapping[str, Any]],
    widths: Mapping[str, Sequence[int]], history: Sequence[Mapping[str, Any]],
) -> str:  # fmt: skip
    """A result as HTML: what each particle costs, and what is left of each layer."""
    n = len(sizes)
    counted, keep = config.budget
    cut = any(size != dense for size in sizes)
    asked = f", asked to keep {100 * keep:g}% of the {COUNTED[counted]}" if keep is not None and cut else ""
    head = f"<b>dllp</b>: {n} {'pruned' if cut else 'whole'} network{'s' * (n > 1)}{asked}"
    if history and history[-1].get("loss"):
        head += f"; loss {fmean(history[-1]['loss']):.4f} after {len(history)} epochs"
    rows = [("dense", dense), *((f"particle {i + 1}", size) for i, size in enumerate(sizes))]
    costs = "".join(
        f"<tr><th>{name}</th><td>{size['macs']:,.0f}</td><td>{_share(size, dense, 'macs')}</td>"
        f"<td>{size['params']:,}</td><td>{_share(size, dense, 'params')}</td></tr>"
        for name, size in rows
    )
    table = f"<table><tr><th></th><th>MACs</th><th></th><th>parameters</th><th></th></tr>{costs}</table>"
    return f"<div>{head}{table}{_layers(widths)}</div>"


def _layers(widths: Mapping[str, Sequence[int]]) -> str:
    if not widths:
        return ""
    rows = []
    for name, (*kept, whole) in widths.items():
        share = 100 * sum(kept) / max(len(kept) * whole, 1)
        bar = f'<div style="width:10em;background:#8884"><div style="width:{share:.1f}%;height:.8em;background:{BAR}">'
        counts = " · ".join(map(str, kept))
        rows.append(f"<tr><th>{html.escape(name)}</th><td>{bar}</div></div></td><td>{counts} of {whole}</td></tr>")
    return f"<details><summary>kept in each layer</summary><table>{''.join(rows)}</table></details>"


def _share(size: Mapping[str, Any], dense: Mapping[str, Any], name: str) -> str:
    return f"{100 * size[name] / dense[name]:.1f}%" if dense[name] else "-"
