"""An answer as a plot: one self-contained HTML page."""

from __future__ import annotations

from html import escape
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from manifests.catalog import write_whole
from manifests.errors import UserError

_LINES_SHOWN = 64


def write_plot(answer: pa.Table, out: Path, *, title: str) -> None:
    """Draws the last column of an answer over its first, a line for each value of the second where there are three or more.

    Args:
        answer: its rows, in the order in which points are joined.
        out: the page, written whole or not at all.
        title: what stands above.

    Raises:
        UserError: the answer has no rows, no number to draw, or more lines than anybody can tell apart.
    """
    from plotly.graph_objects import Figure, Scatter

    columns = answer.column_names
    if answer.num_rows == 0:
        raise UserError("the answer has no rows; there is nothing to draw")
    kind = answer.schema.field(len(columns) - 1).type if columns else pa.null()
    if len(columns) < 2 or not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        raise UserError(
            "--plot draws the last column over the first, and the last is no number; order the columns so with `atoll sql`"
        )
    by = columns[1] if len(columns) > 2 else None
    names = pc.unique(answer[by]).to_pylist() if by is not None else [None]
    if len(names) > _LINES_SHOWN:
        raise UserError(
            f"the answer has {len(names)} values of {by}, a line each; ask for fewer, {_LINES_SHOWN} can be told apart at most"
        )
    figure = Figure()
    for name in names:
        rows = answer.filter(pc.equal(answer[by], name)) if name is not None else answer
        # Text from the store is text of strangers, and plotly knows some HTML.
        figure.add_trace(
            Scatter(
                x=[escape(x) if isinstance(x, str) else x for x in rows[columns[0]].to_pylist()],
                y=rows[columns[-1]].to_pylist(),
                name=escape(str(name)),
                mode="lines+markers" if len(rows) < 100 else "lines",
            )
        )
    figure.update_layout(
        title=escape(title), xaxis_title=columns[0], yaxis_title=columns[-1], showlegend=by is not None, legend_title=by
    )
    write_whole(out, figure.to_html(include_plotlyjs=True).encode())
