"""The page at / in headless Chromium: written to, stopped, pointed at, and used by keyboard."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
from typing import Any

import pytest

from tests.serving.conftest import NAME, gauge, serving, wait_for
from tests.serving.test_limits import running, slowed

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


class Browser:
    """One page, spoken to by the DevTools protocol over a pair of pipes.

    Source: chromedevtools.github.io/devtools-protocol; each message is JSON and a zero byte.
    """

    def __init__(self, folder: str) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser reads its descriptor 3 and writes its 4.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={folder}", "--window-size=1100,900", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, str(CHROMIUM), *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._held, self._number, self.messages = b"", 0, []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attach = {"targetId": page["targetId"], "flatten": True}
        self._session: str | None = self.call("Target.attachToTarget", attach)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session = None

    def call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            self.messages.append(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser ended"
            self._held += data
        first, self._held = self._held.split(b"\0", 1)
        return json.loads(first)

    def open(self, address: str) -> None:
        self.call("Page.navigate", {"url": address})
        wait_for(lambda: self.run("document.readyState") == "complete")

    def run(self, script: str) -> Any:
        arguments = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", arguments)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, modifiers: int = 0) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "End": 35}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", {**event, "type": kind, "modifiers": modifiers})

    def click(self, name: str) -> None:
        """Presses the mouse's button in the middle of an element that is seen."""
        where = (
            "const b = element('%s').getBoundingClientRect(); [b.x + b.width / 2, b.y + b.height"
        )
        x, y = self.run(f"{{{where % name} / 2]}}")
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", event)

    def text(self, name: str) -> str:
        return self.run(f"document.getElementById('{name}').textContent")

    def screenshot(self, path: str) -> None:
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError, AssertionError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(str(tmp_path_factory.mktemp("chromium")))
    yield browser
    browser.close()


def test_writing(browser, address, client):
    browser.messages.clear()
    browser.open(f"{address}/")
    wait_for(lambda: browser.text("name") == NAME)
    assert "parameters" in browser.text("card")
    browser.run(
        "for (const [id, value] of [['prompt', 'def naïve('], ['max_tokens', 20], ['seed', 3],"
        " ['temperature', 0.9]]) element(id).value = value; element('write').click()"
    )
    wait_for(lambda: "20 tokens in" in browser.text("status"))
    asked = {"prompt": "def naïve(", "max_tokens": 20, "seed": 3, "temperature": 0.9}
    expected = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    assert browser.text("output") == "def naïve(" + expected
    assert browser.run("tokens.length") == 20
    # Pointing at a token shows how likely it was.
    browser.run("tokens[2].span.dispatchEvent(new MouseEvent('mouseenter'))")
    assert "token 3 of 20" in browser.text("likely") and "%" in browser.text("likely")
    path = os.environ.get("TFBIG_SCREENSHOT")
    if path:
        browser.screenshot(path)
    urls = [m["params"]["request"]["url"] for m in browser.messages
            if m.get("method") == "Network.requestWillBeSent"]  # fmt: skip
    assert urls and all(url.startswith((address, "data:")) for url in urls), "no external assets"
    problems = [m for m in browser.messages if m.get("method") in
                ("Runtime.exceptionThrown", "Log.entryAdded")]  # fmt: skip
    assert not problems


def test_the_keyboard_is_enough(browser, address):
    browser.open(f"{address}/")
    assert browser.run("document.activeElement.id") == "prompt"
    browser.call("Input.insertText", {"text": "more "})
    browser.press("Enter", modifiers=2)  # with Ctrl
    wait_for(lambda: " tokens in " in browser.text("status"))
    reached = []
    for _ in range(4):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.id"))
    assert reached[:2] == ["write", "output"], "the stop button is off when nothing is written"
    browser.run("element('output').focus()")
    for _ in range(2):
        browser.press("ArrowRight")
    assert browser.text("likely").startswith("token 2 of")
    browser.press("End")
    count = browser.run("tokens.length")
    assert browser.text("likely").startswith(f"token {count} of {count}")
    assert browser.run("document.querySelectorAll('.chosen').length") == 1
    unnamed = browser.run(
        "[...document.querySelectorAll('input, textarea, button')].filter(e =>"
        " !e.labels.length && !e.textContent.trim()).map(e => e.id)"
    )
    assert unnamed == []


def test_stopping_and_errors(browser, model):
    with serving(slowed(model, 0.05), api_key="open") as address:
        browser.open(f"{address}/")
        wait_for(lambda: "wants an API key" in browser.text("status"))
        browser.run(
            "element('key').value = 'open'; element('key').dispatchEvent(new Event('change'))"
        )
        wait_for(lambda: browser.text("name") == NAME)
        browser.run("element('max_tokens').value = 120; element('write').click()")
        wait_for(lambda: browser.run("tokens.length") >= 3)
        browser.press("Escape")
        wait_for(lambda: "stopped after" in browser.text("status"))
        wait_for(lambda: running(address) == 0)
        assert gauge(address, "tfbig_generation_tokens_total") < 120
        # And by the button, as a mouse presses it.
        browser.run("element('write').click()")
        wait_for(lambda: browser.run("tokens.length") >= 3)
        browser.click("stop")
        wait_for(lambda: "stopped after" in browser.text("status"))
        wait_for(lambda: running(address) == 0)
        assert gauge(address, "tfbig_generation_tokens_total") < 240
        browser.run("element('max_tokens').value = 1000; element('write').click()")
        wait_for(lambda: "max_tokens must be from 1 to" in browser.text("status"))
        assert browser.run("element('status').className") == "error"
        assert not browser.run("element('write').disabled")
