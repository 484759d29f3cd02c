import subprocess
import sys

import pytest

from tfbig import __main__ as dispatcher


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tfbig", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_no_command_lists_them_all():
    result = run()
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert listed == list(dispatcher.available_commands())
    assert "install_horovod" in listed


def test_unknown_command_is_one_line_with_near_matches():
    result = run("instal_horovod")
    assert result.returncode == 2
    assert "Did you mean install_horovod?" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_command_gets_its_arguments_and_returns_its_exit_code():
    assert run("install_horovod", "--check").returncode == 0
    result = run("install_horovod", "--nonsense")
    assert result.returncode == 2
    assert "--nonsense" in result.stderr


def test_commands_without_a_module_are_not_listed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(dispatcher.COMMANDS, "nothing_of_the_kind", "never there")
    assert "nothing_of_the_kind" not in dispatcher.available_commands()


def test_dispatching_imports_no_tensorflow():
    program = "import sys, tfbig.__main__ as m; m.usage(); sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
