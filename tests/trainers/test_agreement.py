"""What the ranks compare before they start: every flag, and the code itself."""

import shutil
from pathlib import Path

from tfbig.config import Config, replace_fields
from trainers import agreement


def test_each_flag_has_a_hash_of_its_own():
    before = agreement.fingerprint(Config())
    for name, value in {
        "seed": 7,
        "run_dir": "elsewhere",
        "microbatches": 2,
        "lora_rank": 1,
    }.items():
        after = agreement.fingerprint(replace_fields(Config(), {name: value}))
        assert {flag for flag in before if before[flag] != after[flag]} == {f"--{name}"}
    assert agreement.fingerprint(replace_fields(Config(), {"num_threads": 3})) == before


def test_the_code_is_part_of_it(tmp_path):
    root = Path(agreement.__file__).parents[1]
    for package in agreement.PACKAGES:
        keep = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / package, tmp_path / package, ignore=keep)
    assert agreement.code_hash(tmp_path) == agreement.code_hash(root)
    seen = {agreement.code_hash(tmp_path)}
    for path in ("trainers/mesh.py", "tfbig/model/gpt.py", "data_pipeline/order.py"):
        (tmp_path / path).write_text((tmp_path / path).read_text() + "\n")
        seen.add(agreement.code_hash(tmp_path))
    (tmp_path / "trainers" / "more.py").touch()
    assert len(seen | {agreement.code_hash(tmp_path)}) == 5
