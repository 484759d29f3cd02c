"""Rules while a run trains: looked at by another process, so that no step waits for them.

`live_findings.py` is what that process runs.
"""

import os
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from tfbig.loop import Hook, Progress
from tfbig.profile_config import ProfileConfig
from tfbig.run_folder import EventWriter, RunFolder

_QUIET_LOOKS = 2  # that a rule must pass without firing before it is told of again
_WEBHOOK_SECONDS = 10.0
_POLL_SECONDS = 0.2
_COMMAND = "tfbig.profiler.live_findings"


class LiveRulesHook(Hook):
    """Looks at the rules every so often and acts on those that fire: says, tells, stops.

    A thread has the looks made, so that a run whose first step never comes, or that hangs in a
    step, is told of too. It calls no collective.

    Args:
      folder: of the run.
      profile: what to do when which rule fires.
      stop: ends the run after its next step and a save; takes the reason.
    """

    def __init__(
        self, folder: RunFolder, profile: ProfileConfig, stop: Callable[[str], None]
    ) -> None:
        self._folder, self._profile, self._stop = folder, profile, stop
        self._fired: dict[str, int] = {}  # rule -> looks that it may still be quiet
        self._posts: list[threading.Thread] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfbig-rules", daemon=True)

    def on_start(self, progress: Progress, resumed: bool) -> None:
        self._thread.start()

    def on_stop(self, progress: Progress, reason: str) -> None:
        self.close()

    def close(self) -> None:
        """Ends the looks; one that is under way is given up."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        for post in self._posts:
            post.join(_WEBHOOK_SECONDS)

    def _run(self) -> None:
        while not self._ending.wait(self._profile.rule_seconds):
            try:
                text = self._look()
                if text is not None:
                    self.act(orjson.loads(text))
            except (OSError, ValueError) as error:
                print(
                    f"warning: the rules could not be looked at: {error}",
                    file=sys.stderr,
                    flush=True,
                )

    def _look(self) -> bytes | None:
        """Returns what another process sees, None when the run ends meanwhile.

        Raises:
          OSError: it could not look.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                [sys.executable, "-m", _COMMAND, str(self._folder.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            while child.poll() is None:
                if self._ending.wait(_POLL_SECONDS):
                    child.kill()
                    child.wait()
                    return None
            if child.returncode:
                raise OSError(f"{_COMMAND} ended with code {child.returncode}")
            output.seek(0)
            return output.read()

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
            post = threading.Thread(target=self._post, args=(message,), daemon=True)
            post.start()
            self._posts.append(post)

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
    wanted = profile.print_rules or profile.stop_on_rule or profile.rule_webhook
    if not wanted or not profile.rule_seconds:
        return []
    return [LiveRulesHook(RunFolder(folder), profile, stop)]
