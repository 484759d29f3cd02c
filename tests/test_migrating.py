"""The scripts of docs/migrating-from-sagemaker.md that are ours can be run as they stand."""

import ast
import re
from pathlib import Path

import pytest

from tfbig.train import config_from
from tfbig.validation import validate
from trainers.validate import check_data_parallel_only, check_mesh_fits

PAGE = Path(__file__).parents[1] / "docs" / "migrating-from-sagemaker.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
OURS = [block for block in BLOCKS if "config_from(" in block]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_script_is_python(block):
    assert ast.parse(block).body


@pytest.mark.parametrize("block", OURS)
def test_our_scripts_name_options_that_there_are(block):
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    values = next(
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "config_from"
    )
    config = config_from(values)
    validate(config)
    check = check_mesh_fits if values["strategy"] == "pipeline" else check_data_parallel_only
    check(config)


def test_each_of_the_three_scripts_stands_beside_ours():
    page = PAGE.read_text()
    for library in ("hvd.init()", "sdp.init()", "smp.init()"):
        assert f"\n{library}" in page, library
    assert len(OURS) == 2 and "# here: no script" in page
