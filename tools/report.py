"""The report of a run: its final table, and one self-contained HTML page with its plots. The page loads nothing over the network.

Everything that comes from the store is text of strangers: it goes through `html.escape`, in the page and in the plots, which know some HTML too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from manifests.catalog import Catalog, write_whole
from manifests.errors import Failure
from tools.provenance import check_ledger, checkpoint_mix, last_global_checkpoint

_POINTS, _BARS, _ISLANDS_SHOWN, _ROWS_SHOWN, _CORPORA_SHOWN = 400, 60, 16, 40, 20
"""The most that is shown: points of a line, bars of a mix, islands with a plot of theirs, rows of a table, corpora."""
_TIER_COLOURS = {"S": "#14795b", "A": "#7cc29f", "B": "#ecc05c", "C": "#c4472f"}
_ISLAND_COLOURS = ("#2f6fb7", "#d97a1d", "#7a4ea3", "#1f9aa0", "#b8327d", "#6d7683", "#8a6a2c", "#4b50c4")
_BLACK, _GREY, _RED = "#16191d", "#8f99a6", "#c4472f"
_SYMBOLS = {
    "merge": ("line-ns-open", _GREY), "island_joined": ("triangle-right", "#14795b"), "finished": ("star", _BLACK),
    "island_died": ("x", _RED), "syncer_died": ("x", _RED),
}  # fmt: skip
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

Row = Mapping[str, Any]


def final_table(catalog: Catalog, run: str) -> pa.Table:
    """How the islands and the global state ended up, a row each; see manifests/sql/report_final.sql.

    Raises:
        UserError: the run has no global checkpoint yet.
    """
    last_global_checkpoint(catalog, run)
    return catalog.ask("report_final", run=run)


def write_report(catalog: Catalog, run: str, out: Path) -> None:
    """Writes the page of a run, whole or not at all. Raises UserError where `final_table` does."""
    from plotly.offline import get_plotlyjs

    last = last_global_checkpoint(catalog, run)
    row = catalog.rows("SELECT * FROM runs WHERE run = ? LIMIT 1", [run])[0]
    config, branch = json.loads(row["config"]), json.loads(row["branch"] or "null")
    sections = [
        _facts(catalog, run, config, last),
        _branches(catalog, run, branch),
        _section("Where the islands ended up", _FINAL_READING, _table(final_table(catalog, run))),
        *_losses(catalog, run),
        _mixes(catalog, run, config),
        *_tiers(catalog, config["tier_version"]),
        _made(catalog, run),
        _timeline(catalog, run),
    ]
    page = _PAGE.format(title=escape(run), style=_STYLE, plotly=get_plotlyjs(), body="\n".join(sections))
    write_whole(out, page.encode())


_FINAL_READING = (
    "Compare the holdout loss of the global state with that of each island, lower is better. Mix is the share of S/A/B/C last asked for; "
    "losses are in nats per token; steps and tokens of the global state are sums over what was merged; starts above 1 are restarts."
)


def _facts(catalog: Catalog, run: str, config: Row, last: Row) -> str:
    times = "SELECT min(written_at) AS a, max(written_at) AS b, bool_or(kind = 'finished') AS done FROM events WHERE run = ?"
    when = catalog.rows(times, [run])[0]
    start, end = when["a"] or last["written_at"], when["b"] or last["written_at"]
    merges = catalog.rows("SELECT count(DISTINCT merge) AS n FROM merges WHERE run = ?", [run])[0]["n"]
    loss = last["holdout_loss"]
    facts = {
        "tokens in the global state": f"{last['tokens']:,}",
        "global holdout loss, nats per token": "not measured" if loss is None else f"{loss:.4f}",
        "islands": config["num_islands"],
        "merges": f"{merges:,}",
        "finished" if when["done"] else "not finished; last event": f"{end:%Y-%m-%d %H:%M} UTC",
        "from first to last event": str(end - start).partition(".")[0],
    }
    cards = "".join(f"<div><b>{escape(str(v))}</b><span>{escape(k)}</span></div>" for k, v in facts.items())
    try:
        ledger, colour = check_ledger(catalog, run), "good"
    except Failure as e:
        ledger, colour = str(e), "bad"
    return f'<h1>Run {escape(run)}</h1><div class="cards">{cards}</div><p class="{colour}">{escape(ledger)}</p>'


def _branches(catalog: Catalog, run: str, branch: Row | None) -> str:
    text, branches = "", catalog.ask("report_branches", run=run)
    if branch is not None:
        text = (
            f"<p>This run is a branch of <b>{escape(branch['parent_run'])}</b>: it keeps that run's first {branch['merge']:,} merges "
            f"and took back the documents WHERE <code>{escape(branch['predicate'])}</code>.</p>"
        )
    if branches.num_rows:
        text += (
            f"<p>Runs that branch from this one, each without the documents that it took back:</p>{_table(branches)}"
        )
    return f"<section><h2>Branches</h2>{text}</section>" if text else ""


def _losses(catalog: Catalog, run: str) -> Iterable[str]:
    axes = {"xaxis": _axis("inner step"), "yaxis": _axis("loss, nats per token")}
    losses = _by_island(catalog.ask("report_losses", run=run, points=_POINTS))
    if losses:
        traces = [_line(island, rows, "loss") for island, rows in losses.items()]
        reading = "A falling line learns; islands differ since their mixes do, so an easy mix lies lower without being better."
        yield _section("Training loss of each island", reading, _plot("train", traces, axes))
    holdout = _by_island(catalog.ask("report_holdout", run=run))
    if holdout:
        traces = [_line(island, rows, "holdout_loss") for island, rows in holdout.items()]
        reading = (
            "All are held against the same unseen text, so lower is better: see whether the global state (thick, at the mean step of the "
            "islands merged) gets below the islands that it is made of."
        )
        yield _section("Holdout loss of the islands and the global state", reading, _plot("holdout", traces, axes))


def _line(island: int, rows: Sequence[Row], value: str) -> Row:
    colour = _ISLAND_COLOURS[island % len(_ISLAND_COLOURS)] if island >= 0 else _BLACK
    line = {"color": colour, "width": 1.6 if island >= 0 else 4}
    mode = "lines" if len(rows) > 20 else "lines+markers"
    more = {"name": _island_name(island), "line": line, "mode": mode, "hovertemplate": "step %{x:.0f}: %{y:.4f}"}
    return _points(rows, "step", value) | more


def _mixes(catalog: Catalog, run: str, config: Row) -> str:
    cycle = config["sync_every"]
    realised = _by_island(catalog.ask("report_realised", run=run, cycle_steps=cycle, bars=_BARS))
    asked = _by_island(catalog.ask("report_asked", run=run, round_steps=cycle // config["num_fragments"]))
    islands, plots = sorted(realised.keys() | asked.keys()), []
    share = _axis("share of tokens", tickformat=".0%", range=[0, 1.01])
    layout = {"barmode": "stack", "bargap": 0, "showlegend": False, "xaxis": _axis("inner step"), "yaxis": share}
    line = {"color": _BLACK, "width": 1.6, "dash": "dash", "shape": "hv"}
    for island in islands[:_ISLANDS_SHOWN]:
        bars, borders = realised.get(island, []), asked.get(island, [])
        traces = []
        for tier, colour in _TIER_COLOURS.items():
            more = {"type": "bar", "name": tier, "marker": {"color": colour}, "hovertemplate": "%{y:.1%}"}
            traces.append(_points(bars, "step", tier.lower()) | more | {"width": [row["steps"] for row in bars]})
        for column in ("s", "sa", "sab"):
            traces.append(_points(borders, "step", column) | {"mode": "lines", "line": line, "hoverinfo": "skip"})
        strategy = f" · {escape(borders[-1]['strategy'])}" if borders else ""
        plot = _plot(f"mix{island}", traces, layout, height=230)
        plots.append(f"<div><h3>{_island_name(island)}{strategy}</h3>{plot}</div>")
    if not plots:
        return ""
    reading = (
        "Bands are the tiers that an island trained on, outer cycle by outer cycle; dashed lines are where its strategy wanted the "
        "borders between them: they should meet."
    )
    if len(islands) > len(plots):
        reading += f" The first {len(plots)} of {len(islands)} islands are shown."
    chips = "".join(f'<span class="chip" style="background:{c}"></span>{t} ' for t, c in _TIER_COLOURS.items())
    return _section(
        "Mix of each island", reading, f'<p class="key">{chips}</p><div class="grid">{"".join(plots)}</div>'
    )


def _tiers(catalog: Catalog, tier_version: int) -> Iterable[str]:
    tiers = {row["tier"]: row for row in catalog.ask("tier_table", tier_version=tier_version).to_pylist()}
    columns = {"documents": "documents", "tokens": "tokens", "positive influence": "share_of_influence"}
    bars = {name: {tier: row[column] or 0 for tier, row in tiers.items()} for name, column in columns.items()}
    labels = {tier: dict(row["label_shares"] or ()) for tier, row in tiers.items()}
    for label in sorted({label for shares in labels.values() for label in shares}):
        bars[f"label: {label}"] = {tier: shares.get(label, 0) for tier, shares in labels.items()}
    if tiers:
        reading = "Each bar is a whole, cut into tiers: few documents in S should carry most of the influence"
        reading += ", and documents planted as harmful should lie in C." if len(bars) > len(columns) else "."
        yield _section(f"Tiers of version {tier_version}", reading, _tier_bars("tiers", bars, percent=True))
    curve = catalog.ask("report_concentration", tier_version=tier_version, points=_POINTS).to_pylist()
    if curve:
        alike = {"x": [0, 1], "y": [0, 1], "mode": "lines", "line": {"color": _GREY, "dash": "dot", "width": 1.5}}
        traces = [alike | {"name": "all alike", "hoverinfo": "skip"}]
        for tier, colour in _TIER_COLOURS.items():
            points = _points([row for row in curve if row["tier"] == tier], "documents", "influence")
            hover = "%{x:.1%} of the documents carry %{y:.1%}"
            marker = {"color": colour, "size": 6}
            traces.append(points | {"mode": "markers", "name": tier, "marker": marker, "hovertemplate": hover})
        layout = {
            "xaxis": _axis("share of the documents, most influential first", tickformat=".0%", range=[0, 1.01]),
            "yaxis": _axis("share of the positive influence", tickformat=".0%", range=[0, 1.03]),
        }
        reading = "The further the curve rises above the dotted line, the fewer documents carry the positive influence."
        yield _section("How concentrated influence is", reading, _plot("concentration", traces, layout))


def _made(catalog: Catalog, run: str) -> str:
    made = checkpoint_mix(catalog, run)
    corpora: dict[str, dict[str, int]] = {}
    for row in made.to_pylist():
        tiers = corpora.setdefault(f"{row['corpus']} ({row['origin']})", {})
        tiers[row["tier"]] = tiers.get(row["tier"], 0) + row["tokens"]
    if not corpora:
        return ""
    largest = sorted(corpora, key=lambda name: -sum(corpora[name].values()))[:_CORPORA_SHOWN]
    plot = _tier_bars("made", {name: corpora[name] for name in largest}, percent=False)
    reading = "A bar's length is what a corpus gave to the last global checkpoint, its colours are the tiers that it came from."
    if len(corpora) > len(largest):
        reading += f" The {len(largest)} largest of {len(corpora)} corpora are shown."
    return _section("What made the last global checkpoint", reading, plot + _table(made))


def _tier_bars(name: str, bars: Mapping[str, Row], *, percent: bool) -> str:
    """Horizontal bars, stacked by tier; `percent`: each is a whole. A bar of nothing is left out."""
    shown = {label: tiers for label, tiers in bars.items() if sum(tiers.values()) > 0}
    whole = [sum(tiers.values()) if percent else 1 for tiers in shown.values()]
    places = list(range(len(shown)))
    traces = []
    for tier, colour in _TIER_COLOURS.items():
        lengths = [tiers.get(tier, 0) / w for tiers, w in zip(shown.values(), whole, strict=True)]
        bar = {"type": "bar", "orientation": "h", "name": tier, "marker": {"color": colour}}
        hover = "%{x:.1%}" if percent else "%{x:,} tokens"
        traces.append(bar | {"x": lengths, "y": places, "hovertemplate": hover})
    # Places are numbers and labels a text beside them: a corpus may be called 2024, and long names may look alike once cut.
    labels = [escape(label if len(label) <= 32 else label[:31] + "…") for label in shown]
    layout = {
        "barmode": "stack",
        "xaxis": _axis("share", tickformat=".0%", range=[0, 1.01]) if percent else _axis("tokens"),
        "yaxis": _axis("", tickvals=places, ticktext=labels, autorange="reversed", showgrid=False),
    }
    return _plot(name, traces, layout, height=130 + 30 * len(shown))


def _timeline(catalog: Catalog, run: str) -> str:
    events = catalog.ask("report_events", run=run, points=_POINTS).to_pylist()
    if not events:
        return ""
    lanes = sorted({row["island"] for row in events}, key=lambda island: (island < 0, island))
    names = [_island_name(island) if island >= 0 else "syncer" for island in lanes]
    traces = []
    for kind in dict.fromkeys(row["kind"] for row in events):
        rows = [row | {"lane": lanes.index(row["island"])} for row in events if row["kind"] == kind]
        symbol, colour = _SYMBOLS.get(kind, ("diamond", "#7a4ea3"))
        line = {"width": 1.5 if kind == "merge" else 0, "color": colour}
        marker = {"symbol": symbol, "color": colour, "size": 11, "line": line}
        text = {"text": [escape(row["detail"][:200]) for row in rows], "hovertemplate": "%{x}<br>%{text}"}
        traces.append(
            _points(rows, "written_at", "lane") | text | {"mode": "markers", "name": escape(kind), "marker": marker}
        )
    ticks = {"tickvals": list(range(len(lanes))), "ticktext": names, "range": [len(lanes) - 0.5, -0.5]}
    layout = {"xaxis": _axis("time, UTC"), "yaxis": _axis("", **ticks)}
    reading = "A tick is a merge that took something from the island, a triangle a start, a cross a death: in a gap the others went on without it."
    return _section("What happened when", reading, _plot("events", traces, layout, height=150 + 34 * len(names)))


def _plot(name: str, traces: Sequence[Row], layout: Row, *, height: int = 380) -> str:
    from plotly.io import to_html

    base = {
        "template": {}, "font": {"family": _FONT, "size": 13, "color": "#2a3038"}, "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "white", "plot_bgcolor": "white", "hovermode": "closest", "hoverlabel": {"namelength": -1},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}, "autosize": True,
    }  # fmt: skip
    figure = {"data": traces, "layout": {**base, **layout}}
    options = {"responsive": True, "displayModeBar": False}
    plot = to_html(figure, options, include_plotlyjs=False, full_html=False, default_height=f"{height}px", div_id=name)
    return f'<div class="plot" style="height:{height}px">{plot}</div>'


def _points(rows: Sequence[Row], x: str, y: str) -> dict[str, Any]:
    return {"x": [row[x] for row in rows], "y": [row[y] for row in rows]}


def _axis(title: str, **more: Any) -> dict[str, Any]:
    line = {"gridcolor": "#e6e9ee", "zeroline": False, "linecolor": "#c3c9d1", "automargin": True, "fixedrange": True}
    return line | {"title": {"text": title, "standoff": 8}} | more


def _by_island(rows: pa.Table) -> dict[int, list[Row]]:
    return {island: list(group) for island, group in groupby(rows.to_pylist(), key=lambda row: row["island"])}


def _island_name(island: int) -> str:
    return f"island {island}" if island >= 0 else "global"


def _section(title: str, reading: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="reading">{escape(reading)}</p>{body}</section>'


def _table(table: pa.Table) -> str:
    starts = ["" if pa.types.is_string(field.type) else ' class="n"' for field in table.schema]

    def row(tag: str, texts: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}{s}>{escape(t)}</{tag}>' for s, t in zip(starts, texts, strict=True))}</tr>"

    shown = table.slice(0, _ROWS_SHOWN).to_pylist()
    body = row("th", (name.replace("_", " ") for name in table.column_names))
    body += "".join(row("td", map(_cell, values.values())) for values in shown)
    more = f"<p>{table.num_rows - len(shown):,} more rows are not shown.</p>" if table.num_rows > len(shown) else ""
    return f'<div class="scroll"><table>{body}</table></div>{more}'


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


_STYLE = f"""
body {{ font: 16px/1.5 {_FONT}; color: #2a3038; background: #f4f6f8; margin: 0 }}
main {{ max-width: 1080px; margin: 0 auto; padding: 16px }} .reading, .key {{ margin: 0 0 8px; color: #5b6570 }}
section, .cards div {{ background: white; border: 1px solid #e2e6eb; border-radius: 8px; padding: 8px 14px }} section {{ margin: 16px 0 }}
h1 {{ margin: 12px 0; overflow-wrap: anywhere }} h2 {{ margin: 4px 0; font-size: 20px }} h3 {{ margin: 8px 0 0; font-size: 15px }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 10px }}
.cards b {{ display: block; font-size: 18px }} .cards span {{ color: #5b6570; font-size: 13px }}
.good {{ color: #14795b }} .bad {{ color: #c4472f; font-weight: bold }} code {{ overflow-wrap: anywhere }}
.chip {{ display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 10px; border-radius: 2px }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(380px, 100%), 1fr)); gap: 8px 20px }}
.grid > div, .plot {{ min-width: 0; overflow: hidden }} .scroll {{ overflow-x: auto }} .n {{ text-align: right }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums }}
th, td {{ padding: 4px 10px; border-bottom: 1px solid #e6e9ee; white-space: nowrap }} th {{ color: #5b6570; font-weight: 600 }}
th:not(.n), td:not(.n) {{ text-align: left }}
"""

# The policy lets the page's own script draw, and nothing be fetched from anywhere.
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>Atoll: run {title}</title><style>{style}</style><script>{plotly}</script></head>
<body><main>
{body}
</main></body></html>
"""
