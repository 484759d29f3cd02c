"""Arrays in .json files: read in chunks of any size, they are what a JSON parser says they are."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from data_pipeline.documents import BadRecord, parse_json
from data_pipeline.json_arrays import array_records, array_units
from tfbig.errors import UserError

TEXTS = st.text(st.sampled_from('ab\\"[]{},: \n\u2028é🙂'), max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers(-9, 99) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ARRAYS = st.builds(
    lambda values, indent, ascii_only: json.dumps(
        values, indent=indent, ensure_ascii=ascii_only
    ).encode(),
    st.lists(VALUES, max_size=6),
    st.sampled_from([None, 1]),
    st.booleans(),
)
SIZES = st.integers(1, 9)
ON_BUSY_MACHINES = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def in_chunks(data, size):
    return iter([data[start : start + size] for start in range(0, len(data), size)])


def read(data, size):
    records = array_records(in_chunks(data, size), "a.json", 1, in_array=False, is_part=False)
    return [value for _, value in records]


@ON_BUSY_MACHINES
@given(ARRAYS, SIZES)
def test_an_array_is_read_as_a_parser_reads_it(data, size):
    assert read(data, size) == json.loads(data)
    assert read(b"\xef\xbb\xbf\n " + data + b" \r\n\t", size) == json.loads(data)


@ON_BUSY_MACHINES
@given(ARRAYS, SIZES, st.data())
@example(b"[1,]", 1, None)
@example(b"[,1]", 1, None)
@example(b"[1,,2]", 1, None)
@example(b"[1], [2, 3]", 1, None)
@example(b"[1]]", 1, None)
@example(b"[1", 1, None)
@example(b"[1,", 1, None)
@example(b"[[1}, 2]", 1, None)
@example(b'["a]', 1, None)
@example(b'["\\', 1, None)
@example(b"[1]\x0c", 1, None)
@example(b"[", 1, None)
@example(b"[}", 1, None)
@example(b"[0\0, 1]", 1, None)
@example(b"\x0c[1]", 1, None)
def test_what_a_parser_refuses_is_refused(data, size, changes):
    if changes is not None:
        place = changes.draw(st.integers(1, len(data) - 1))
        inserted = changes.draw(st.sampled_from([b"", b"\\", b'"', b",", b"]", b"[", b"}", b"\0"]))
        data = data[:place] + inserted + data[place + changes.draw(st.integers(0, 3)) :]
    try:
        expected = parse_json(data)
    except BadRecord:
        with pytest.raises(UserError, match=r"a\.json (is cut short|record \d+ is not valid JSON)"):
            read(data, size)
    else:
        assert read(data, size) == expected


@ON_BUSY_MACHINES
@given(ARRAYS, SIZES, st.integers(1, 4))
def test_parts_of_an_array_hold_its_records_one_after_the_other(data, size, num_units):
    units = [unit for unit, _ in array_units(in_chunks(data, size), "a.json")]
    assert b"".join(units) == data
    found = []
    for first in range(0, len(units), num_units):
        part = b"".join(units[first : first + num_units])
        inside = {"in_array": first > 0, "is_part": True}
        found += array_records(in_chunks(part, size), "a.json", first + 1, **inside)
    assert found == [(f"record {n}", value) for n, value in enumerate(json.loads(data), 1)]
