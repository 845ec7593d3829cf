"""A real browser without a window, steered through the pipe that Chromium has for that; nothing to install but it."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 120
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--mute-audio"),
)


def binary() -> str | None:
    """A Chromium on this machine, if there is one."""
    return next((found for name in BINARIES if (found := shutil.which(name))), None)


class Browser:
    """One page at a time; what it says and asks for is kept."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._number, self._rest = 0, b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    return self.call(method, **params)  # a live page was loading itself again; ask the new one
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._receive, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def open(self, path: Path, width: int, *, dark: bool = False) -> None:
        """Load a file into a page of this width, and wait until it has loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(path.as_uri())}")

    def wait(self, script: str) -> None:
        """Until an expression is true: some events come after the click that causes them."""
        end = time.monotonic() + PATIENCE_S
        while not self.evaluate(script):
            assert time.monotonic() < end, f"still not true: {script}"

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of an element."""
        place = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def type(self, selector: str, text: str) -> None:
        """Text into a field, as soon as there is one: a page may be loading again."""
        self.wait(f"(e => (e?.focus(), e !== null))(document.querySelector({json.dumps(selector)}))")
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def errors(self) -> list[str]:
        """What the page complained about."""
        return [text for event in self.events if (text := _complaint(event))]

    def requests(self) -> list[str]:
        """What it asked for besides data in itself."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("data:")]


def _complaint(event: dict[str, Any]) -> str:
    method, params = event.get("method"), event.get("params", {})
    if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        return params["entry"]["text"]
    if method == "Runtime.exceptionThrown":
        return params["exceptionDetails"].get("exception", {}).get("description", "an exception")[:300]
    return str(params.get("args"))[:300] if method == "Runtime.consoleAPICalled" else ""


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile."""
    found = binary()
    assert found is not None
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    # It reads from descriptor 3 and writes to 4; by way of higher ones, since ours may have these numbers.
    words = [found, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    shell = f'exec "$@" 3<&{their_in} 4>&{their_out}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *words],
        pass_fds=(their_in, their_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Browser(our_out, our_in)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(our_out)
        os.close(our_in)
