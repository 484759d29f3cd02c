"""Which groups are measured, and which of them stand out."""

from tfbig.diagnosis.bandwidth import Measured, describe, each_once, groups_to_measure, host_pairs
from trainers.mesh import make_mesh


def test_every_axis_and_pair_of_hosts():
    mesh = make_mesh(4, 1, 2, "cluster")
    assert groups_to_measure(mesh, ["a", "a", "b", "b"]) == [
        ("data", (0, 2)),
        ("data", (1, 3)),
        ("tensor", (0, 1)),
        ("tensor", (2, 3)),
        ("pair", (0, 2)),
    ]


def test_of_many_hosts_the_neighbours():
    assert len(host_pairs([f"h{i}" for i in range(8)])) == 28
    pairs = host_pairs([f"h{i}" for i in range(20)])
    assert len(pairs) == 20 and pairs[-1] == (19, 0)
    assert host_pairs(["a", "a"]) == []


def test_the_slowest_rank_counts_and_the_slow_pair_is_named():
    values = [
        Measured("data", (0, 1, 2), 900.0, 20.0),
        Measured("data", (0, 1, 2), 800.0, 30.0),
        Measured("a-b", (0, 1), 1000.0, 9.0),
        Measured("a-c", (0, 2), 1000.0, 9.0),
        Measured("b-c", (1, 2), 400.0, 9.0),
    ]
    once = each_once([[value._asdict()] for value in values])
    assert once[0] == Measured("data", (0, 1, 2), 800.0, 30.0) and len(once) == 4
    found = describe(once, 0.0).findings
    assert [f.level for f in found] == ["fine", "fine", "fine", "warning"]
    assert found[0].text == "data axis, ranks 0, 1, 2: 800 MB/s, 30 us"
    assert "b-c: 400 MB/s" in found[3].text and "1,000" in found[3].advice
    assert [f.level for f in describe(once, 500.0).findings][3] == "problem"
