"""The layers of the project: who may import whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("tfbig", "trainers", "data_pipeline")
# Folders of tfbig that may use trainers and data_pipeline, besides the entry points.
UPPER = (
    "generation interop serving profiler planner diagnosis launching"
    " verify attention_trial first_data"
).split()
ENTRY_POINTS = (
    "prepare train evaluate generate export serve plan report doctor data checkpoints launch"
    " install_horovod __main__"
).split()


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer_of(module: str) -> int:
    parts = module.split(".")
    if parts[0] in ("trainers", "data_pipeline"):
        return 2
    if len(parts) > 1 and parts[1] in UPPER:
        return 3
    if len(parts) > 1 and parts[1] in ENTRY_POINTS:
        return 4
    return 1


def files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_imports_go_one_way(path):
    module = module_of(path)
    for name in imports_of(path):
        if name.split(".")[0] not in FOLDERS or name == "tfbig":
            continue
        assert layer_of(name) <= layer_of(module), f"{module} imports {name}"
        assert layer_of(name) < 4 or module in ("tfbig.__main__", name), (
            f"{module} imports the entry point {name}"
        )
        pair = {module.split(".")[0], name.split(".")[0]}
        assert pair != {"trainers", "data_pipeline"}, f"{module} imports {name}"


def test_only_collectives_imports_horovods_tensorflow():
    users = [module_of(p) for p in files() if any("horovod.t" in n for n in imports_of(p))]
    assert set(users) <= {"trainers.collectives", "tfbig.horovod_selftest"}, users


def test_package_inits_import_nothing():
    for path in files():
        if path.name == "__init__.py":
            top = ast.parse(path.read_text()).body
            assert not any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in top), path
