"""A report as one HTML page that needs nothing else: no network, no other file."""

import html
import re
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from tfbig.profiler.document import Document, Section, Table, text_of

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1em;
  color: #1b1b1f; background: #fff; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.2em; border-bottom: 1px solid #ccc; }
.verdict { background: #f3f6fb; border-left: 4px solid #3b6fb6; padding: .6em 1em .6em 2.2em; }
.verdict li { margin: .3em 0; } .verdict li:first-child { font-weight: 600; }
.scroll { overflow-x: auto; } .long { max-height: 34em; }
table { border-collapse: collapse; margin: .8em 0; font-size: .86em; }
th, td { padding: .25em .7em; border-bottom: 1px solid #e2e2e6; text-align: left;
  vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { background: #f5f5f8; position: sticky; top: 0; }
tr.fired td { background: #fff1e6; }
figure { margin: 1em 0; } figcaption, caption { color: #555; font-size: .9em; text-align: left; }
nav a { margin-right: 1em; }
"""
# No request leaves the page, whatever a chart library does.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
_LONG = 30  # rows of a table from which on it scrolls
_ICON = "data:,"  # else browsers ask for favicon.ico


def to_html(document: Document, refresh_seconds: int = 0) -> str:
    """Returns the page.

    Args:
      document: of the report.
      refresh_seconds: after which the page loads itself anew; 0 means never.
    """
    title = html.escape(document.title)
    verdict = "".join(f"<li>{html.escape(text)}</li>" for text in document.verdict)
    links = "".join(
        f'<a href="#{_anchor(section)}">{html.escape(section.title)}</a>'
        for section in document.sections
    )
    number = 0
    parts = []
    for section in document.sections:
        text, number = _section(section, number)
        parts.append(text)
    refresh = f'<meta http-equiv="refresh" content="{refresh_seconds}">' if refresh_seconds else ""
    return (
        "<!DOCTYPE html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>{refresh}'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="{_ICON}"><style>{_STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body>\n"
        f'<h1>{title}</h1><ol class="verdict">{verdict}</ol><nav>{links}</nav>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _anchor(section: Section) -> str:
    return re.sub(r"\W+", "-", section.title.lower())


def _section(section: Section, number: int) -> tuple[str, int]:
    """Returns a section's HTML, and the number of figures so far."""
    parts = [f'<section id="{_anchor(section)}"><h2>{html.escape(section.title)}</h2>']
    parts += [f"<p>{html.escape(text)}</p>" for text in section.paragraphs if text]
    for caption, figure in section.figures:
        number += 1
        parts.append(_figure(figure, f"figure-{number}", caption))
    parts += [_table(table) for table in section.tables]
    return "\n".join([*parts, "</section>"]), number


def _figure(figure: go.Figure, name: str, caption: str) -> str:
    figure.update_layout(template="plotly_white", margin={"l": 60, "r": 20, "t": 40, "b": 40})
    drawn = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        config={"displaylogo": False, "responsive": True},
    )
    return f"<figure><figcaption>{html.escape(caption)}</figcaption>{drawn}</figure>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(str(column))}</th>" for column in table.columns)
    caption = f"<caption>{html.escape(table.caption)}</caption>" if table.caption else ""
    rows = "".join(_row(row) for row in table.rows)
    kind = "long scroll" if len(table.rows) > _LONG else "scroll"
    return f'<div class="{kind}"><table>{caption}<tr>{head}</tr>{rows}</table></div>'


def _row(row: Any) -> str:
    def cell(value: Any) -> str:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return f"<td{' class=n' if is_number else ''}>{html.escape(text_of(value))}</td>"

    fired = " class=fired" if "FIRED" in row else ""
    return f"<tr{fired}>{''.join(map(cell, row))}</tr>"
