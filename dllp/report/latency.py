"""Measured time: the share of the saved FLOPs that became saved time, and the layers that hold the network back."""

from __future__ import annotations

from collections.abc import Sequence

from dllp.deploy.speed import DENSE, LayerTime, describe, headline, holding_back
from dllp.deploy.speed import Row as SpeedRow
from dllp.report import compare, figures
from dllp.report.contents import Run, Speed
from dllp.report.figures import BLUE, CYCLE, ORANGE, ROW, VERMILION, Plot, Section, axis, bars, names_axis, short
from dllp.report.page import folded, metric, note, table

MOST = 30  # layers that are drawn: those that lose most time


def section(run: Run) -> Section | None:
    """Times of dense and pruned network; None where nothing was measured and nothing can be said."""
    speed = run.speed
    if speed is None or not speed.rows:
        why = run.missing.get("latency", "")
        return Section("speed", "Speed", markup=note(why)) if why else None
    held = holding_back(speed.layers)
    plots = (*compare.latency({run.name: run}), _times(speed), *([_layers(speed.layers)] if held else ()))
    markup = note(speed.int8) + _table(speed.rows)
    return Section("speed", "Speed", lead=_lead(speed, held), markup=markup, plots=plots)


def _lead(speed: Speed, held: Sequence[LayerTime]) -> str:
    row = headline(speed.rows)
    if row is None:
        return speed.source
    text = f"{row.speedup:.2f}× as fast as dense ({describe(row)}; {speed.source})."
    if row.share is not None:
        text += f" {100 * row.share:.0f}% of the saved FLOPs became saved time."
        if row.share < 1 and held:
            names = ", ".join(f"{layer.layer} ({layer.lost_ms:.2f} ms)" for layer in held[:3])
            text += f" What holds it back most: {names}, in milliseconds above their share of the FLOPs."
    return text


def _times(speed: Speed) -> Plot:
    networks = list(dict.fromkeys(row.network for row in speed.rows))
    traces = []
    for i, network in enumerate(networks):
        rows = [row for row in speed.rows if row.network == network]
        spread = {"type": "data", "symmetric": False, "array": short(1e3 * (r.high - r.median) / r.batch for r in rows),
                  "arrayminus": short(1e3 * (r.median - r.low) / r.batch for r in rows)}  # fmt: skip
        traces.append(bars(
            network, [figures.plot_text(describe(row), 60) for row in rows], [1e3 * r.median / r.batch for r in rows],
            ORANGE if network == DENSE else CYCLE[(i - 1) % 5], error_x=spread,
            hovertemplate="%{y}: %{x:.3f} ms for each example",
        ))  # fmt: skip
    settings = len({describe(row) for row in speed.rows})
    layout = {"xaxis": axis("milliseconds for each example"), "yaxis": names_axis(), "barmode": "group"}
    caption = "Median time with quartiles; the networks took turns, so that all saw the same machine."
    return Plot("latency", "Measured time", caption, traces, layout, height=160 + 16 * settings * len(networks))


def _layers(layers: Sequence[LayerTime]) -> Plot:
    worst = sorted(layers, key=lambda layer: -layer.lost_ms)[:MOST]
    chosen = [layer for layer in layers if layer in worst]
    names = figures.distinct(f"{layer.layer} ({layer.dense_width} → {layer.pruned_width})" for layer in chosen)
    ideal = {"symbol": "line-ns-open", "size": 16, "line": {"width": 3}, "color": VERMILION}
    traces = [
        bars("dense", names, [layer.dense_ms for layer in chosen], ORANGE),
        bars("pruned", names, [layer.pruned_ms for layer in chosen], BLUE),
        figures.marks("ideal", [layer.dense_ms * layer.kept_macs for layer in chosen], names, ideal),
    ]
    layout = {"xaxis": axis("milliseconds of one batch"), "yaxis": names_axis(), "barmode": "group"}
    caption = (
        "Time of each layer, dense and pruned, with its channels. The upright mark (ideal) is the dense time scaled by "
        "the FLOPs that are left: what a pruned bar reaches beyond it holds the network back."
    )
    return Plot("layers", "Layers that hold it back", caption, traces, layout, height=140 + 2 * ROW * len(chosen))


def _table(rows: Sequence[SpeedRow]) -> str:
    cells = [
        [f"{row.network}, {describe(row)}", f"{1e3 * row.median:.3f}", f"{row.throughput:.0f}",
         "–" if row.speedup is None else f"{row.speedup:.2f}×", "–" if row.share is None else f"{100 * row.share:.0f}%",
         metric("accuracy", row.accuracy)]
        for row in rows
    ]  # fmt: skip
    heads = ("network", "ms", "examples/s", "speed-up", "time share", "accuracy")
    return folded("Every setting", table(heads, cells))
