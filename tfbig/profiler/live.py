"""Rules while a run trains: looked at by another process, so that no step waits for them.

`live_findings.py` is what that process runs.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import orjson

from tfbig.loop import Hook, Progress
from tfbig.profile_config import ProfileConfig
from tfbig.run_folder import EventWriter, RunFolder

_QUIET_LOOKS = 2  # that a rule must pass without firing before it is told of again
_WEBHOOK_SECONDS = 10.0
_COMMAND = "tfbig.profiler.live_findings"


class LiveRulesHook(Hook):
    """Looks at the rules every so often and acts on those that fire: says, tells, stops.

    Args:
      folder: of the run.
      profile: what to do when which rule fires.
      stop: ends the run after its next step and a save; takes the reason.
    """

    def __init__(
        self, folder: RunFolder, profile: ProfileConfig, stop: Callable[[str], None]
    ) -> None:
        self._folder, self._profile, self._stop = folder, profile, stop
        self._next = time.monotonic() + profile.rule_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._fired: dict[str, int] = {}  # rule -> looks that it may still be quiet
        self._threads: list[threading.Thread] = []

    def on_step(self, record: dict[str, Any]) -> None:
        if self._child is not None:
            if self._child.poll() is not None:
                self._read()
        elif time.monotonic() >= self._next:
            self._look()

    def on_stop(self, progress: Progress, reason: str) -> None:
        self.close()

    def close(self) -> None:
        """Ends a look that is under way."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
        for thread in self._threads:
            thread.join(_WEBHOOK_SECONDS)

    def _look(self) -> None:
        # Two files of the child's, no pipe: nobody reads while the steps run.
        self._output = tempfile.TemporaryFile()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            [sys.executable, "-m", _COMMAND, str(self._folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def _read(self) -> None:
        assert self._child is not None and self._output is not None
        code, self._child = self._child.returncode, None
        self._output.seek(0)
        text = self._output.read()
        self._output.close()
        self._next = time.monotonic() + self._profile.rule_seconds
        if code:
            print("warning: the rules could not be looked at", file=sys.stderr, flush=True)
            return
        self.act(orjson.loads(text))

    def act(self, findings: Sequence[dict[str, Any]]) -> None:
        """Acts on findings, under smdebug's names, of one look."""
        fired = {one["RuleName"]: one for one in findings if one["RuleTriggered"]}
        for rule, finding in fired.items():
            if rule not in self._fired:
                self._tell(finding)
            self._fired[rule] = _QUIET_LOOKS
        for rule in [rule for rule in self._fired if rule not in fired]:
            self._fired[rule] -= 1
            if not self._fired[rule]:
                del self._fired[rule]
        for rule in self._profile.stop_on_rule:
            if rule in fired:
                self._stop(f"rule {rule}")

    def _tell(self, finding: dict[str, Any]) -> None:
        rule, evidence = finding["RuleName"], finding["Evidence"]
        print(f"rule {rule}: {evidence}. Change: {finding['Change']}", flush=True)
        events = EventWriter(self._folder.events_path)
        events.write_event("rule", evidence, rule=rule)
        events.close()
        if self._profile.rule_webhook:
            message = {"run": str(self._folder.path), **finding}
            thread = threading.Thread(target=self._post, args=(message,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _post(self, message: dict[str, Any]) -> None:
        request = urllib.request.Request(
            self._profile.rule_webhook,
            orjson.dumps(message),
            {"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=_WEBHOOK_SECONDS).close()
        except (urllib.error.URLError, OSError) as error:
            print(f"warning: --rule_webhook was not told: {error}", file=sys.stderr, flush=True)


def live_hooks(
    profile: ProfileConfig, folder: Path, stop: Callable[[str], None]
) -> list[LiveRulesHook]:
    """Returns the hook where something is to be done when a rule fires, else none."""
    wanted = profile.stop_on_rule or profile.rule_webhook
    if not wanted or not profile.rule_seconds:
        return []
    return [LiveRulesHook(RunFolder(folder), profile, stop)]
