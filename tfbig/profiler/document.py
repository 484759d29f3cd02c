"""A report as titles, sentences, tables and figures; HTML, Markdown and JSON are made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Table:
    """Rows under columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass
class Section:
    """One subject."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[tuple[str, Any]] = field(default_factory=list)  # caption, plotly figure


@dataclass
class Document:
    """A whole report.

    Args:
      title: of the page.
      verdict: sentences that stand first; the first one is the shortest account of the run.
      sections: in order.
      numbers: for JSON.
    """

    title: str
    verdict: list[str]
    sections: list[Section]
    numbers: Mapping[str, Any]


def text_of(value: Any) -> str:
    """Returns a cell's text.

    >>> text_of(1234.5678), text_of(0.01234), text_of(None)
    ('1,235', '0.01234', '-')
    """
    if value is None or (isinstance(value, float) and value != value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
