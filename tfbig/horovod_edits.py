"""tfbig's edits to the source of Horovod 0.28.1: exact texts, each found exactly once, or nothing.

What each edit cures was measured on TensorFlow 2.21; tests/test_install_horovod.py keeps the proof.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tfbig import durable_file


@dataclasses.dataclass(frozen=True)
class Edit:
    """One exact-text replacement.

    Args:
      letter: the cure it is part of; several edits may share one.
      path: the file, relative to the source tree's root.
      old: the text to be replaced, which occurs exactly once in the file.
      new: its replacement.
    """

    letter: str
    path: str
    old: str
    new: str


class EditsDoNotFit(Exception):
    """The source tree isn't the one that the edits were made for; nothing was written."""


# (a) TensorFlow 2.21 no longer ships the headers that xla_mpi_ops.cc includes. Nothing is lost:
#     tfbig never calls Horovod inside a jit-compiled function.
_XLA_OPERATIONS = Edit(
    "a",
    "horovod/tensorflow/CMakeLists.txt",
    'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
    "",
)

# (b) reserve() leaves the size at 0, so under Gloo the stall inspector loops over no ranks: a job
#     in which one rank never submits its tensor hangs for ever, without a word.
_STALL_INSPECTOR = Edit(
    "b",
    "horovod/common/gloo/gloo_controller.cc",
    "  global_ranks_.reserve(size_);\n",
    "  global_ranks_.resize(size_);\n",
)

# (c) Collectives have side effects on other ranks, yet are declared without: TensorFlow's graph
#     optimizer prunes those whose result is unused, merges those with equal inputs and folds those
#     with constant ones, differently on each rank. See github.com/horovod/horovod/issues/3229.
#     Stateful ops are chained in graph order; trainers/collectives.py undoes just that.
_MPI_OPS = "horovod/tensorflow/mpi_ops.cc"
_STATEFUL = tuple(
    Edit(
        "c",
        _MPI_OPS,
        f'REGISTER_OP("{name}")\n    .{first}(',
        f'REGISTER_OP("{name}")\n    .SetIsStateful()\n    .{first}(',
    )
    for name, first in (
        ("HorovodAllreduce", "Attr"),
        ("HorovodGroupedAllreduce", "Attr"),
        ("HorovodAllgather", "Attr"),
        ("HorovodGroupedAllgather", "Attr"),
        ("HorovodBroadcast", "Attr"),
        ("HorovodBroadcastInplace", "Attr"),
        ("HorovodBroadcastInplaceResource", "Attr"),
        ("HorovodReducescatter", "Attr"),
        ("HorovodGroupedReducescatter", "Attr"),
        ("HorovodAlltoall", "Attr"),
        ("HorovodJoin", "Output"),
    )
)

# (d) After a peer's death the removal of process sets is negotiated with it all the same. That
#     throws outside the background thread's try block: std::terminate, SIGABRT, and no Python
#     exception in which to save. The sets are finalized locally instead.
_PEER_DEATH = (
    Edit(
        "d",
        "horovod/common/process_set.cc",
        """  std::vector<int32_t> ids_copy(ids_.begin(), ids_.end());
  for (auto id : ids_copy) {
""",
        """  std::vector<int32_t> ids_copy(ids_.begin(), ids_.end());
  bool peers_reachable = true;
  for (auto id : ids_copy) {
""",
    ),
    Edit(
        "d",
        "horovod/common/process_set.cc",
        """    MarkProcessSetForRemoval(id);
    // Block until all processes have been able to finalize and deregister
    // this process set.
    while (true) {
      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      if (ProcessSetHasJustBeenRemoved()) {
        break;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
""",
        """    MarkProcessSetForRemoval(id);
    // Block until all processes have been able to finalize and deregister
    // this process set.
    while (peers_reachable) {
      try {
        InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      } catch (const std::exception& ex) {
        LOG(ERROR) << "Process sets are finalized without the other ranks, "
                      "because one of them is gone: " << ex.what();
        peers_reachable = false;
        break;
      }
      if (ProcessSetHasJustBeenRemoved()) {
        break;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    if (!peers_reachable) {
      id_to_process_set_[id].Finalize(status);
      DeregisterProcessSet(id);
      id_to_be_removed_ = NO_PENDING_REMOVAL;
    }
""",
    ),
)

# (e) GPU builds: no library of TensorFlow 2.21 defines stream_executor::gpu::AsGpuStreamValue, so
#     what Horovod declares and calls could never be loaded. The declaration goes; a definition of
#     our own comes once stream.h has been included.
_GPU_STREAM = (
    Edit(
        "e",
        _MPI_OPS,
        """// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
""",
        "",
    ),
    Edit(
        "e",
        _MPI_OPS,
        """#endif // TENSORFLOW_VERSION >= 2011000000
#endif // HAVE_GPU

// Undef LOG macro from TensorFlow
""",
        """#endif // TENSORFLOW_VERSION >= 2011000000

namespace stream_executor {
namespace gpu {
static inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
#endif // HAVE_GPU

// Undef LOG macro from TensorFlow
""",
    ),
)

# (f) distutils left Python in 3.12, and horovodrun imports it.
_DISTUTILS = Edit(
    "f",
    "horovod/runner/js_run.py",
    "from distutils.spawn import find_executable\n",
    "from shutil import which as find_executable\n",
)

# (g) CMake 4 refuses Gloo's minimum of 2.8.12. The plain gloo library is compiled but never linked
#     where TensorFlow wants C++17 (compatible17_gloo is): half a minute saved.
_CMAKE = (
    Edit(
        "g",
        "third_party/gloo/CMakeLists.txt",
        "cmake_minimum_required(VERSION 2.8.12 FATAL_ERROR)\n",
        "cmake_minimum_required(VERSION 3.13 FATAL_ERROR)\n",
    ),
    Edit(
        "g",
        "CMakeLists.txt",
        "    add_subdirectory(third_party/gloo)\n",
        "    add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)\n",
    ),
)

# (h) setup_requires makes setuptools fetch packages in the middle of the build, and setuptools
#     means to drop it. In its place goes the record of what the build was made from, as a file that
#     is part of the package: another Horovod installed over ours takes it away.
BUILD_RECORD = "tfbig_build.json"
_RECORD = Edit(
    "h",
    "setup.py",
    "      setup_requires=require_list if is_build_action() else [],\n",
    f"      package_data={{'horovod': ['{BUILD_RECORD}']}},\n",
)

# (i) horovodrun's rendezvous server forgets a group's addresses once all its ranks have left. But
#     the first group to be complete empties the count of every other one, so their addresses stay;
#     a Horovod started again in the same processes then connects to ports that are closed.
_RENDEZVOUS = Edit(
    "i",
    "horovod/runner/http/http_server.py",
    "                        self.server.finished_list.clear()\n",
    "                        self.server.finished_list.pop(scope)\n",
)

# (j) Debug symbols take a fifth of the compiler's time and nine tenths of the wheel.
_RELEASE = Edit(
    "j",
    "setup.py",
    """ == "1" else 'RelWithDebInfo'\n""",
    """ == "1" else 'Release'\n""",
)

# (k) What horovodrun itself prints: no notices of TensorFlow's start, and one line instead of a
#     traceback of its own when a process has failed and has said why.
_LAUNCH = "horovod/runner/launch.py"
_SCREEN = (
    Edit(
        "k",
        _LAUNCH,
        "import yaml\n\nimport horovod\n",
        "import yaml\n\nos.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')\nimport horovod\n",
    ),
    Edit(
        "k",
        _LAUNCH,
        "logging.getLevelName(args.log_level))\n\n    _run(args)\n",
        """logging.getLevelName(args.log_level))

    try:
        _run(args)
    except RuntimeError as error:
        if args.verbose:
            raise
        sys.exit('horovodrun: ' + ' '.join(str(error).split()))
""",
    ),
)

# (l) horovodrun kills its processes 5 s after their SIGTERM, in the middle of a checkpoint. It
#     gives them TFBIG_GRACE_SECONDS; the shell around a process, which has nothing to save, keeps
#     its 5. By default 20: a process that hangs holds up the end of a failed job for as long.
_SHELL = "horovod/runner/common/util/safe_shell_exec.py"
_GRACE = (
    Edit(
        "l",
        _SHELL,
        "GRACEFUL_TERMINATION_TIME_S = 5\n",
        "GRACEFUL_TERMINATION_TIME_S = float(os.environ.get('TFBIG_GRACE_SECONDS') or 20)\n",
    ),
    Edit(
        "l",
        _SHELL,
        "        p.wait(timeout=GRACEFUL_TERMINATION_TIME_S)\n",
        "        p.wait(timeout=5)\n",
    ),
)

# (m) The connections of every group, the world's own among them, ignore the network interface
#     that was chosen and go by the host's name: where it does not resolve, as in many containers,
#     the process crashes; where it is 127.0.1.1, as Debian sets it up, hosts don't find each other.
_INTERFACE = Edit(
    "m",
    "horovod/common/gloo/gloo_context.cc",
    """  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
    """  gloo_iface_ = global_context.gloo_iface_;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);

  global_ctx = global_context.ctx;
""",
)

# (n) An elastic world forms anew when every rank of the last one waits for it or has ended. Of a
#     rank on a host that is cut off or down horovodrun only has ssh's connection, which stays open
#     for hours without a word. ssh asks the other end, and ends where that is silent for as long as
#     the other ranks wait for it (trainers/collectives.py) or a little longer.
_LOST_HOST = Edit(
    "n",
    "horovod/runner/gloo_run.py",
    """                                         identity_file=settings.ssh_identity_file)
""",
    """                                         identity_file=settings.ssh_identity_file)
            if settings.elastic and command.startswith('ssh '):
                patience = int(os.environ.get('HOROVOD_GLOO_TIMEOUT_SECONDS')
                               or max(60, settings.max_num_proc or settings.num_proc))
                command = (f'ssh -o ServerAliveInterval={max(1, patience // 10)} '
                           f'-o ServerAliveCountMax=10 {command[len("ssh "):]}')
""",
)

EDITS: tuple[Edit, ...] = (
    _XLA_OPERATIONS,
    _STALL_INSPECTOR,
    *_STATEFUL,
    *_PEER_DEATH,
    *_GPU_STREAM,
    _DISTUTILS,
    *_CMAKE,
    _RECORD,
    _RENDEZVOUS,
    _RELEASE,
    *_SCREEN,
    *_GRACE,
    _INTERFACE,
    _LOST_HOST,
)


def edits_sha256(edits: Sequence[Edit] = EDITS) -> str:
    """Returns a digest that changes with any edit's file, text or place in the order."""
    texts = [dataclasses.astuple(edit) for edit in edits]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def apply_edits(tree: Path, edits: Sequence[Edit] = EDITS) -> list[Path]:
    """Applies every edit to an unpacked source tree, or none of them.

    Args:
      tree: the folder that holds Horovod's setup.py.
      edits: what to apply, in order; a later edit sees an earlier one's text.

    Returns:
      The files written, sorted.

    Raises:
      EditsDoNotFit: a file is missing, or a text does not occur exactly once; nothing is written.
    """
    texts: dict[str, str] = {}
    problems = []
    for edit in edits:
        if edit.path not in texts:
            try:
                texts[edit.path] = (tree / edit.path).read_text(encoding="utf-8")
            except OSError as error:
                problems.append(f"({edit.letter}) {edit.path}: {error.strerror}")
                continue
        found = texts[edit.path].count(edit.old)
        if found == 1:
            texts[edit.path] = texts[edit.path].replace(edit.old, edit.new)
        else:
            first_line = edit.old.strip().splitlines()[0]
            problems.append(f"({edit.letter}) {edit.path}: {first_line!r} occurs {found} times")
    if problems:
        raise EditsDoNotFit(
            "the edits do not fit this source, nothing was written:\n  " + "\n  ".join(problems)
        )
    for path, text in texts.items():
        durable_file.write_atomic(tree / path, text.encode())
    return sorted(tree / path for path in texts)
