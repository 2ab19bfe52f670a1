"""An answer as a plot: one self-contained HTML page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa

from manifests.catalog import write_whole
from manifests.errors import UserError

_LINES_SHOWN = 64


def write_plot(answer: pa.Table, out: Path, *, title: str) -> None:
    """Draws the last column of an answer over its first number or time, a line for each combination of its texts; bars where there's one number only.

    Args:
        answer: its rows, in the order in which points are joined.
        out: the page, written whole or not at all.
        title: what stands above.

    Raises:
        UserError: the answer has no rows, its last column is no number, or it has more lines than anybody can tell apart.
    """
    from plotly.graph_objects import Bar, Figure, Scatter

    if answer.num_rows == 0:
        raise UserError("the answer has no rows; there is nothing to draw")
    texts = [field.name for field in answer.schema if pa.types.is_string(field.type)]
    measures = [field.name for field in answer.schema if _is_measure(field.type)]
    last = answer.column_names[-1]
    if not _is_number(answer.schema.field(last).type):
        raise UserError("--plot draws the last column, and that is no number; put another one last with `atoll sql`")
    figure = Figure()
    across = measures[0]
    if across == last:
        across = ", ".join(texts)
        figure.add_trace(Bar(x=[_label(row, texts) for row in answer.to_pylist()], y=answer[last].to_pylist()))
    else:
        lines: dict[str, list[dict[str, Any]]] = {}
        for row in answer.to_pylist():
            lines.setdefault(_label(row, texts), []).append(row)
        if len(lines) > _LINES_SHOWN:
            raise UserError(
                f"the answer has a line for each {' and '.join(texts)}, {len(lines)} of them; ask for fewer, {_LINES_SHOWN} can be told apart at most"
            )
        for name, rows in lines.items():
            mode = "lines+markers" if len(rows) < 100 else "lines"
            points = {"x": [row[across] for row in rows], "y": [row[last] for row in rows]}
            figure.add_trace(Scatter(name=name, mode=mode, **points))
    figure.update_layout(
        title=escape(title), xaxis_title=escape(across), yaxis_title=escape(last), showlegend=len(figure.data) > 1
    )
    write_whole(out, figure.to_html(include_plotlyjs=True).encode())


def _label(row: dict[str, Any], texts: list[str]) -> str:
    # Text from the store is text of strangers, and plotly knows some HTML.
    return escape(", ".join(str(row[name]) for name in texts))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_measure(kind: pa.DataType) -> bool:
    return _is_number(kind) or bool(pa.types.is_temporal(kind))
