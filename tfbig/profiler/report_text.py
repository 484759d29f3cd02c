"""A report as Markdown and as JSON."""

from typing import Any

import orjson

from tfbig.profiler.document import Document, Table, text_of


def to_markdown(document: Document) -> str:
    """Returns a report without its figures."""
    lines = [f"# {document.title}", ""]
    lines += [f"{number}. {text}" for number, text in enumerate(document.verdict, 1)]
    for section in document.sections:
        if not section.paragraphs and not section.tables:
            continue
        lines += ["", f"## {section.title}", "", *filter(None, section.paragraphs)]
        for table in section.tables:
            lines += ["", *_table(table)]
    return "\n".join(lines) + "\n"


def _table(table: Table) -> list[str]:
    def row(cells: Any) -> str:
        return "| " + " | ".join(text_of(c).replace("|", "\\|") for c in cells) + " |"

    lines = [table.caption, ""] if table.caption else []
    return [*lines, row(table.columns), row(["---"] * len(table.columns)), *map(row, table.rows)]


def to_json(document: Document) -> str:
    """Returns a report's verdict and numbers."""
    record = {"title": document.title, "verdict": document.verdict, **document.numbers}
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
    return orjson.dumps(record, option=options).decode() + "\n"
