"""A page about a data folder: tables and plots of its documents, tokens and sources."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline import manifest
from tfbig.durable_file import write_atomic
from tfbig.errors import UserError

REPORT = "report.html"
_STYLE = """
body { font-family: sans-serif; max-width: 70em; margin: 2em auto; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr:nth-child(even) { background: #f3f3f3; }
"""


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Writes the report of a data folder, from its manifest alone.

    Args:
      folder: of the data.
      path: of the page; None means FOLDER/report.html.

    Returns:
      The page's path. It needs nothing else: the plots' program is inside.

    Raises:
      UserError: it is no data folder, or plotly is not installed.
    """
    contents = manifest.read(folder).contents
    path = path or folder / REPORT
    sources = _by_source(contents["statistics"])
    sections = [
        f"<h1>{html.escape(str(folder))}</h1>",
        f"<p>{_summary(contents)}</p>",
        "<h2>Splits</h2>",
        _splits_table(contents),
        "<h2>Sources</h2>",
        _sources_table(sources),
        *_plots(sources),
        "<h2>Inputs</h2>",
        _inputs_table(contents["inputs"]),
        _duplicates(contents["duplicates"]),
    ]
    page = (
        f"<!doctype html><html><head><meta charset='utf-8'><title>{html.escape(folder.name)}"
        f"</title><style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )
    write_atomic(path, page.encode())
    return path


def _by_source(statistics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the statistics of each source over all splits, the largest first."""
    found: dict[str, dict[str, Any]] = {}
    for of_split in statistics.values():
        for source, entry in of_split.items():
            total = found.setdefault(source, {"lengths": {}})
            for name in ("documents", "bytes", "tokens", "duplicates", "removed"):
                total[name] = total.get(name, 0) + entry[name]
            for place, count in entry["lengths"].items():
                place = int(place)
                total["lengths"][place] = total["lengths"].get(place, 0) + count
    return dict(sorted(found.items(), key=lambda item: -item[1]["bytes"]))


def _summary(contents: Mapping[str, Any]) -> str:
    packing = contents["packing"]
    words = f"{packing['policy']}, tail {packing['tail']}"
    return html.escape(
        f"Rows of {contents['sequence_length']} tokens ({contents['dtype']}, {words}); vocabulary "
        f"of {contents['tokenizer']['vocab_size']:,}; tokenizer "
        f"{contents['tokenizer']['sha256'][:12]}; document shuffle's seed {contents['seed']}."
    )


def _table(head: list[str], rows: list[list[Any]]) -> str:
    def cell(value: Any) -> str:
        text = f"{value:,}" if isinstance(value, int) else value
        return f"<td>{html.escape(str(text))}</td>"

    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _splits_table(contents: Mapping[str, Any]) -> str:
    rows = []
    for split, described in contents["splits"].items():
        counts = described["sources"].values()
        totals = [sum(entry[name] for entry in counts) for name in ("documents", "tokens")]
        dropped = sum(entry["dropped_tokens"] for entry in counts)
        room = described["rows"] * contents["sequence_length"]
        rows.append(
            [
                split,
                totals[0],
                described["rows"],
                totals[1],
                f"{totals[1] / room:.2%}",
                described["bytes"],
                dropped,
                len(described["shards"]),
            ]
        )
    head = "split,documents,rows,labels,of the rows,bytes of text,dropped tokens,shards"
    return _table(head.split(","), rows)


def _sources_table(sources: Mapping[str, Mapping[str, Any]]) -> str:
    total = max(1, sum(entry["bytes"] for entry in sources.values()))
    rows = [
        [
            name,
            entry["documents"],
            entry["bytes"],
            f"{entry['bytes'] / total:.2%}",
            entry["tokens"],
            f"{entry['bytes'] / max(1, entry['tokens']):.2f}",
            f"{entry['bytes'] / max(1, entry['documents']) / 1024:.2f}",
            entry["duplicates"],
            entry["removed"],
        ]
        for name, entry in sources.items()
    ]
    head = "source,documents,bytes,share,tokens,bytes per token,mean KiB,duplicates,removed"
    return _table(head.split(","), rows)


def _inputs_table(inputs: list[dict[str, Any]]) -> str:
    def counted(entry: Mapping[str, Any]) -> str:
        found = {**entry["skipped"], **entry["changed"], **entry["bad"]}
        return "; ".join(f"{count:,} {reason}" for reason, count in found.items())

    rows = [
        [entry["path"], entry["bytes"], entry["documents"], counted(entry), entry["sha256"][:12]]
        for entry in inputs
    ]
    return _table(["file", "bytes", "documents", "not taken as it was", "sha256"], rows)


def _duplicates(found: Mapping[str, int]) -> str:
    if not found:
        return "<p>Duplicates were counted within each source, not removed.</p>"
    return (
        f"<p>Of {found['documents']:,} documents, {found['equal']:,} were equal to another and "
        f"{found['near']:,} nearly so: they were removed.</p>"
    )


def _plots(sources: Mapping[str, Mapping[str, Any]]) -> list[str]:
    try:
        import plotly.graph_objects as plotly
    except ImportError:
        raise UserError("the report needs plotly: python -m pip install plotly") from None

    names = list(sources)
    figures = []
    for title, values in (
        ("Bytes of text", [sources[name]["bytes"] for name in names]),
        (
            "Bytes per token",
            [sources[name]["bytes"] / max(1, sources[name]["tokens"]) for name in names],
        ),
    ):
        bar = plotly.Bar(x=values, y=names, orientation="h")
        figure = plotly.Figure(bar, layout={"title": title, "height": 160 + 26 * len(names)})
        figure.update_yaxes(autorange="reversed")
        figures.append(figure)
    lengths = plotly.Figure(layout={"title": "Documents by their length in tokens"})
    for name in names:
        places = sorted(sources[name]["lengths"])
        lengths.add_bar(
            x=[f"{2**place:,}" for place in places],
            y=[sources[name]["lengths"][place] for place in places],
            name=name,
        )
    every = sorted({place for name in names for place in sources[name]["lengths"]})
    lengths.update_layout(barmode="stack")
    lengths.update_xaxes(categoryarray=[f"{2**p:,}" for p in every], title="tokens, from ... on")
    figures.append(lengths)
    return [
        figure.to_html(
            full_html=False,
            include_plotlyjs="inline" if number == 0 else False,
            div_id=f"plot-{number}",
        )
        for number, figure in enumerate(figures)
    ]
