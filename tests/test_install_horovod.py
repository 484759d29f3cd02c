import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfbig import horovod_build, horovod_edits, horovod_wheel, install_horovod
from tfbig.errors import UserError
from tfbig.horovod_build import TensorFlowDistribution, build_options, build_record
from tfbig.horovod_edits import EDITS, Edit, EditsDoNotFit, apply_edits, edits_sha256

WORKER = Path(__file__).with_name("horovod_edits_worker.py")


def make_tree(folder: Path, edits: tuple[Edit, ...] = EDITS) -> dict[str, str]:
    """Writes a source tree that holds nothing but the edits' old texts."""
    texts: dict[str, str] = {}
    for edit in edits:
        if edit.old not in texts.get(edit.path, ""):
            texts[edit.path] = texts.get(edit.path, "// before\n") + edit.old + "\n// after\n"
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return texts


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


class TestEdits:
    def test_all_cures_are_there(self):
        assert {edit.letter for edit in EDITS} == set("abcdefghijklmn")
        assert sum(edit.letter == "c" for edit in EDITS) == 11

    @pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit.letter}-{edit.path}")
    def test_edit_alone_replaces_its_text(self, edit: Edit, tmp_path: Path):
        make_tree(tmp_path, (edit,))
        apply_edits(tmp_path, [edit])
        assert (tmp_path / edit.path).read_text() == f"// before\n{edit.new}\n// after\n"

    def test_all_together(self, tmp_path: Path):
        before = make_tree(tmp_path)
        written = apply_edits(tmp_path)
        assert [str(path.relative_to(tmp_path)) for path in written] == sorted(before)
        after = contents(tmp_path)
        for edit in EDITS:
            assert edit.new in after[edit.path]
            assert edit.old not in after[edit.path].replace(edit.new, "")

    @pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit.letter}-{edit.path}")
    @pytest.mark.parametrize("count", [0, 2])
    def test_wrong_count_writes_nothing(self, edit: Edit, count: int, tmp_path: Path):
        text = make_tree(tmp_path)[edit.path]
        (tmp_path / edit.path).write_text(text.replace(edit.old, edit.old * count))
        before = contents(tmp_path)
        with pytest.raises(EditsDoNotFit, match=re.escape(f"({edit.letter}) {edit.path}")):
            apply_edits(tmp_path)
        assert contents(tmp_path) == before

    def test_missing_file_writes_nothing(self, tmp_path: Path):
        make_tree(tmp_path)
        (tmp_path / "setup.py").unlink()
        before = contents(tmp_path)
        with pytest.raises(EditsDoNotFit, match=r"setup\.py"):
            apply_edits(tmp_path)
        assert contents(tmp_path) == before

    def test_gpu_stream_is_defined_where_it_was_declared(self, tmp_path: Path):
        make_tree(tmp_path)
        apply_edits(tmp_path)
        source = (tmp_path / "horovod/tensorflow/mpi_ops.cc").read_text()
        assert source.count("GpuStreamHandle AsGpuStreamValue(Stream* stream)") == 1
        assert "GpuStreamHandle AsGpuStreamValue(Stream* stream) {" in source

    def test_cmake_minimum_is_one_that_cmake_4_takes(self, tmp_path: Path):
        make_tree(tmp_path)
        apply_edits(tmp_path)
        text = (tmp_path / "third_party/gloo/CMakeLists.txt").read_text()
        (minimum,) = re.findall(r"cmake_minimum_required\(VERSION (\d+)\.(\d+)", text)
        assert tuple(map(int, minimum)) >= (3, 5)

    def test_digest_changes_with_every_part(self):
        edit = EDITS[0]
        variants = [
            [edit],
            [Edit("z", edit.path, edit.old, edit.new)],
            [Edit(edit.letter, "other", edit.old, edit.new)],
            [Edit(edit.letter, edit.path, "other", edit.new)],
            [Edit(edit.letter, edit.path, edit.old, "other")],
            [edit, EDITS[1]],
            [EDITS[1], edit],
        ]
        assert len({edits_sha256(variant) for variant in variants}) == len(variants)


class TestKey:
    tensorflow = TensorFlowDistribution("tensorflow-cpu", "2.21.0")

    def key(self, **changes: object) -> str:
        arguments = {"tensorflow": self.tensorflow, "options": build_options({}), **changes}
        return build_record(**arguments)["key"]

    def test_is_stable(self):
        assert self.key() == self.key()

    def test_changes_with_every_ingredient(self, monkeypatch: pytest.MonkeyPatch):
        keys = [
            self.key(),
            self.key(tensorflow=TensorFlowDistribution("tensorflow", "2.21.0")),
            self.key(tensorflow=TensorFlowDistribution("tensorflow-cpu", "2.21.1")),
            self.key(options=build_options({"HOROVOD_GPU_OPERATIONS": "NCCL"})),
            self.key(options=build_options({"HOROVOD_WITH_MPI": "1"})),
            self.key(options=build_options({"CXX": "clang++"})),
            self.key(edits="0" * 64),
        ]
        for module, name, value in (
            (horovod_build.sysconfig, "get_config_var", lambda name: "cpython-399"),
            (horovod_build.sysconfig, "get_platform", lambda: "linux-riscv64"),
            (horovod_build.platform, "libc_ver", lambda: ("glibc", "2.99")),
            (horovod_build, "SDIST_SHA256", "0" * 64),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, value)
                keys.append(self.key())
        assert len(set(keys)) == len(keys)


class TestOptions:
    def test_default_is_tensorflow_and_gloo_alone(self):
        assert build_options({"PATH": "/bin", "HOROVOD_RANK": "0"}) == {
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_TENSORFLOW": "1",
        }

    def test_nccl_and_mpi_pass_through(self):
        given = {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_HOME": "/opt/nccl",
            "HOROVOD_BUILD_CUDA_CC_LIST": "80,90",
            "HOROVOD_WITH_MPI": "1",
        }
        options = build_options(given)
        assert given.items() <= options.items()
        assert "HOROVOD_WITHOUT_MPI" not in options

    @pytest.mark.parametrize(
        "name",
        ["HOROVOD_FUSION_THRESHOLD", "HOROVOD_NUM_NCCL_STREAMS", "HOROVOD_GLOO_TIMEOUT_SECONDS"],
    )
    def test_options_of_a_run_are_none_of_the_build(self, name: str):
        assert build_options({name: "1"}) == build_options({})

    @pytest.mark.parametrize("name", ["HOROVOD_WITHOUT_GLOO", "HOROVOD_WITHOUT_TENSORFLOW"])
    def test_what_tfbig_needs_cannot_be_left_out(self, name: str):
        with pytest.raises(UserError, match=name):
            build_options({name: "1"})


class TestWheel:
    def test_sdist_with_another_digest_is_refused(self, tmp_path: Path):
        sdist = tmp_path / horovod_wheel.SDIST_NAME
        sdist.write_bytes(b"something else")
        with pytest.raises(UserError, match="sha256"):
            horovod_wheel.check_sdist(sdist)

    def test_damaged_wheel_is_not_used(self, tmp_path: Path):
        made = tmp_path / "horovod-1-py3-none-any.whl"
        made.write_bytes(b"wheel")
        folder = tmp_path / "cache"
        kept = horovod_wheel.keep_wheel(made, folder)
        assert horovod_wheel.cached_wheel(folder) == kept
        assert not made.exists()
        kept.write_bytes(b"whee")
        assert horovod_wheel.cached_wheel(folder) is None

    def test_wheel_without_description_is_not_there(self, tmp_path: Path):
        (tmp_path / "horovod-1-py3-none-any.whl").write_bytes(b"wheel")
        assert horovod_wheel.cached_wheel(tmp_path) is None

    def test_lock_keeps_a_second_process_out(self, tmp_path: Path):
        program = (
            "import sys, pathlib; from tfbig.horovod_wheel import exclusive\n"
            "with exclusive(pathlib.Path(sys.argv[1]), 'the test'): print('got it')"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "lock")]
        with horovod_wheel.exclusive(tmp_path / "lock", "nobody"):
            second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert second.stdout is not None
            assert "waiting for the test" in second.stdout.readline()
            assert second.poll() is None
        output, _ = second.communicate(timeout=30)
        assert output == "got it\n"

    def test_command_is_ended_at_its_timeout(self):
        code, text = horovod_wheel.run_bounded(
            [sys.executable, "-c", "import time; print('hello', flush=True); time.sleep(60)"], 2
        )
        assert (code, text) == (-15, "hello\n")

    def test_what_it_started_ends_with_it(self, tmp_path: Path):
        """SIGTERM, as the command handles it, leaves no process of a build behind."""
        program = (
            "import signal, sys; from tfbig.horovod_wheel import run_bounded\n"
            "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))\n"
            "run_bounded(['sh', '-c', 'echo $$ > pid.tmp; mv pid.tmp pid; sleep 60'], 60)"
        )
        environ = os.environ | {"PYTHONPATH": str(WORKER.parent.parent)}
        parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environ)
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        child = int((tmp_path / "pid").read_text())
        parent.terminate()
        assert parent.wait(30) == 143
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def install_fake(
    folder: Path, monkeypatch: pytest.MonkeyPatch, record: dict | None, *tensorflows: str
) -> None:
    """Makes a folder the only place where installed distributions are found."""
    names = [("horovod", "0.28.1")] if record is not None else []
    for name, version in names + [tuple(name.split()) for name in tensorflows]:
        path = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        path.mkdir()
        (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if record:
        (folder / "horovod").mkdir()
        (folder / "horovod" / horovod_edits.BUILD_RECORD).write_text(json.dumps(record))
    # Python 3.13 reads metadata with modules that it imports then: its own folders stay.
    own = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(folder), *own])


class TestCheckInstalled:
    record = build_record(TensorFlowDistribution("tensorflow-cpu", "2.21.0"), build_options({}))

    @pytest.mark.parametrize(
        ("record", "tensorflow", "message"),
        [
            (None, "tensorflow-cpu 2.21.0", "Horovod is not installed"),
            ({}, "tensorflow-cpu 2.21.0", "not tfbig's build"),
            (record | {"edits_sha256": "0"}, "tensorflow-cpu 2.21.0", "another version of tfbig"),
            (record, "tensorflow-cpu 2.21.1", "for tensorflow-cpu 2.21.0, but tensorflow-cpu 2.21"),
            (record, "tensorflow 2.21.0", "tensorflow-cpu 2.21.0, but tensorflow 2.21.0 is"),
        ],
    )
    def test_message(self, record, tensorflow, message, tmp_path, monkeypatch):
        install_fake(tmp_path, monkeypatch, record, tensorflow)
        with pytest.raises(UserError, match=message) as caught:
            horovod_build.check_installed()
        assert "run `python -m tfbig.install_horovod`" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_fitting_build_passes(self, tmp_path, monkeypatch):
        install_fake(tmp_path, monkeypatch, self.record, "tensorflow-cpu 2.21.0")
        horovod_build.check_installed()

    def test_no_tensorflow(self, tmp_path, monkeypatch):
        install_fake(tmp_path, monkeypatch, self.record)
        with pytest.raises(UserError, match=r"TensorFlow is not installed: run `pip install"):
            horovod_build.check_installed()

    def test_two_tensorflows(self, tmp_path, monkeypatch):
        install_fake(
            tmp_path, monkeypatch, self.record, "tensorflow 2.21.0", "tensorflow-cpu 2.21.0"
        )
        with pytest.raises(UserError, match="both installed"):
            horovod_build.find_tensorflow()


class TestCommand:
    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tfbig.install_horovod", *arguments],
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def test_this_installation_fits(self):
        result = self.run("--check")
        assert result.returncode == 0, result.stderr
        assert "fits" in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "environ", "message"),
        [
            (["--chek"], {}, "Did you mean --check?"),
            ([], {"HOROVOD_WITHOUT_GLOO": "1"}, "HOROVOD_WITHOUT_GLOO"),
            ([], {"HOROVOD_GPU_OPERATIONS": "NCCL"}, "tensorflow-cpu is installed"),
        ],
    )
    def test_mistake_is_one_line(self, arguments, environ, message):
        result = self.run(*arguments, **environ)
        assert result.returncode == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_horovodrun_needs_no_distutils():
    program = "import sys; sys.modules['distutils'] = None; import horovod.runner.js_run"
    environ = os.environ | {"SETUPTOOLS_USE_DISTUTILS": "stdlib"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, timeout=60)
    assert done.returncode == 0


def test_rendezvous_counts_each_group_by_itself():
    """Ranks leave the groups in any order; the addresses go when the last of a group has left."""
    program = """
import urllib.error
from urllib.request import Request, urlopen
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

server = RendezvousServer()
port = server.start()
server.init(get_host_assignments(parse_hosts("localhost:2"), 2))

def request(method, path, data=None):
    with urlopen(Request(f"http://127.0.0.1:{port}/{path}", data, method=method)) as answer:
        return answer.read()

request("PUT", "global/0", b"address")
request("DELETE", "global/0")
request("DELETE", "cross_0/0")  # a group of one, complete at once
assert request("GET", "global/0") == b"address"
request("DELETE", "global/1")
try:
    request("GET", "global/0")
except urllib.error.HTTPError as error:
    print(error.code)
server.stop()
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "404\n", result.stderr


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Runs the worker on two ranks, and returns the folder it wrote to and its output."""
    folder = tmp_path_factory.mktemp("edits")
    horovodrun = Path(sys.executable).with_name("horovodrun")
    _, text = horovod_wheel.run_bounded(
        [str(horovodrun), "--gloo", "-np", "2", sys.executable, str(WORKER), str(folder)],
        timeout=180,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    return folder, text


def seen(two_processes: tuple[Path, str], name: str) -> object:
    folder, text = two_processes
    path = folder / f"{name}.json"
    assert path.exists(), text[-3000:]
    return json.loads(path.read_text())


@pytest.mark.distributed
class TestTwoProcesses:
    @pytest.mark.parametrize("name", ["unused", "constant", "equal_first", "equal_second"])
    def test_collective_runs_every_time(self, name: str, two_processes):
        events = seen(two_processes, "timeline")
        (row,) = {
            event["pid"]
            for event in events
            if event.get("name") == "process_name" and event["args"].get("name") == name
        }
        runs = [event for event in events if event.get("pid") == row and event.get("ph") == "B"]
        assert [run["name"] for run in runs].count("ALLREDUCE") == 3

    def test_sums_are_right(self, two_processes):
        assert seen(two_processes, "sums") == [[2.0] * 4] * 2

    def test_stall_names_the_missing_rank_and_ends(self, two_processes):
        assert "shut down" in str(seen(two_processes, "stall"))
        assert re.search(r"Missing ranks:\n.*1!?: \[lonely\]", two_processes[1])

    def test_peer_death_is_an_exception(self, two_processes):
        assert "shut down" in str(seen(two_processes, "death"))

    def test_horovodrun_reports_a_failed_rank_in_one_line(self, two_processes):
        output = two_processes[1]
        assert "Traceback" not in output
        assert re.search(r"^horovodrun: .*Process name: 1 Exit code: 137$", output, re.MULTILINE)


def test_self_test_fails_without_the_library(monkeypatch: pytest.MonkeyPatch):
    def without(command, timeout, **options):
        return 0, "    [ ] TensorFlow\n    [X] PyTorch\n    [X] Gloo\n"

    monkeypatch.setattr(install_horovod, "run_bounded", without)
    with pytest.raises(horovod_wheel.InstallFailed, match="does not list TensorFlow"):
        install_horovod.self_test({})
