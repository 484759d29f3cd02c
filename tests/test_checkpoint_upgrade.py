"""Manifests of older formats are made into the newest one, step by step."""

from pathlib import Path

import pytest

from tfbig.checkpoint_format import FORMAT_VERSION, UnreadableCheckpointError
from tfbig.checkpoint_upgrade import UPGRADES, upgraded

PATH = Path("step_00000001/manifest.json")


def renamed(manifest):
    return manifest | {"variables": {f"new/{path}": v for path, v in manifest["variables"].items()}}


MADE_UP = {2: renamed, 3: lambda manifest: manifest | {"seeds": {}}}


def test_each_version_goes_through_all_that_came_after_it():
    old = {"format_version": 2, "variables": {"x": {}}}
    found = upgraded(old, PATH, MADE_UP, newest=4)
    assert found == {"format_version": 4, "variables": {"new/x": {}}, "seeds": {}}
    assert old == {"format_version": 2, "variables": {"x": {}}}
    found = upgraded({"format_version": 3, "variables": {"x": {}}}, PATH, MADE_UP, newest=4)
    assert found["variables"] == {"x": {}} and found["seeds"] == {}
    newest = {"format_version": 4, "variables": {"x": {}}}
    assert upgraded(newest, PATH, MADE_UP, newest=4) is newest


@pytest.mark.parametrize("version", [1, 5, None, "2", 2.0])
def test_other_versions_are_refused(version):
    with pytest.raises(UnreadableCheckpointError, match=f"format_version {version}, .* 2 to 4;"):
        upgraded({"format_version": version}, PATH, MADE_UP, newest=4)


def test_every_version_before_the_newest_has_its_upgrade():
    assert set(UPGRADES) == set(range(min(UPGRADES, default=FORMAT_VERSION), FORMAT_VERSION))
