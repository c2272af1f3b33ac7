"""Headless Chromium for tests: one process, driven over its DevTools pipe, no library needed.

`--remote-debugging-pipe` reads commands from file descriptor 3 and writes answers to 4, each a JSON
text that ends in a zero byte.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 60.0
KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    " ": (32, " "),
    "PageUp": (33, ""),
    "PageDown": (34, ""),
    "End": (35, ""),
    "Home": (36, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    "[": (219, "["),
    "]": (221, "]"),
}


def find_chromium() -> str | None:
    """The browser that VORT_CHROMIUM names, or the first that is installed."""
    named = os.environ.get("VORT_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running Chromium; `open` gives pages, `close` ends it."""

    def __init__(self, binary: str) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="vort-chromium-", ignore_cleanup_errors=True
        )
        commands_in, self._commands = os.pipe()
        self._answers, answers_out = os.pipe()
        ends = [_out_of_the_way(commands_in), _out_of_the_way(answers_out)]
        plumbing = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]} {ends[0]}<&- {ends[1]}>&-'
        flags = [
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder.name}",
            "--no-first-run",
            "--no-default-browser-check",
            "--no-sandbox",  # containers run tests as root, where the sandbox cannot start
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", plumbing, "chromium", binary, *flags],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def open(self, file: Path, *, width: int = 1280, height: int = 900) -> "Page":
        """A new page on a file, loaded."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(self, target, attached["sessionId"])
        page.resize(width, height)
        page.load(file)
        return page

    def call(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        """The answer to one DevTools command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._receive(TIMEOUT)
            if answer is None:
                raise TimeoutError(f"no answer to {method} within {TIMEOUT:g} s")
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def listen(self, seconds: float) -> None:
        """Collect events for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            event = self._receive(left)
            if event is not None:
                self.events.append(event)

    def close(self) -> None:
        """End the process and remove its profile."""
        try:
            self.call("Browser.close")
        except (OSError, TimeoutError, EOFError):
            self._process.kill()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._folder.cleanup()

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0, end - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise EOFError("Chromium ended")
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message


class Page:
    """One tab: what a person does with it, and what it did that it should not."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self._target, self._session = browser, target, session
        self.file: Path | None = None
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """A DevTools command to this tab."""
        return self.browser.call(method, params, self._session)

    def load(self, file: Path) -> None:
        """Go to a file and wait until its scripts are done."""
        self.file = file
        answer = self.call("Page.navigate", {"url": file.resolve().as_uri()})
        if "errorText" in answer:
            raise FileNotFoundError(f"{file}: {answer['errorText']}")
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """The size of the window, and whether it is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1}
            | {"mobile": phone},
        )

    def prefer(self, scheme: str) -> None:
        """Light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", {"features": [feature]})

    def js(self, expression: str) -> Any:
        """The value of an expression, promises awaited."""
        answer = self.call(
            "Runtime.evaluate",
            {"expression": expression, "returnByValue": True, "awaitPromise": True},
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", str(details)))
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = TIMEOUT) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} did not become true within {seconds:g} s")
            time.sleep(0.02)

    def middle(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into view."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.js(
            f"(() => {{ const b = {element}.getClientRects()[0];"
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        return x, y

    def hover(self, selector: str, dx: float = 0, dy: float = 0) -> None:
        """Move the mouse over an element, off its middle by so many pixels."""
        x, y = self.middle(selector)
        self._mouse("mouseMoved", x + dx, y + dy)

    def click(self, selector: str) -> None:
        """Press and let go of the left button on an element."""
        x, y = self.middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, x, y)

    def press(self, key: str, times: int = 1, *, control: bool = False) -> None:
        """Strike a key."""
        code, text = KEYS[key]
        down: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
        down["modifiers"] = 2 if control else 0
        for _ in range(times):
            self.call("Input.dispatchKeyEvent", {"type": "keyDown", "text": text, **down})
            self.call("Input.dispatchKeyEvent", {"type": "keyUp", **down})

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        options = {"format": "png", "captureBeyondViewport": whole}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", options)["data"]))

    def pdf(self, file: Path) -> None:
        """The page as it prints, on A4."""
        options = {"printBackground": True, "paperWidth": 8.27, "paperHeight": 11.69}
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", options)["data"]))

    def complaints(self) -> list[str]:
        """Console errors, exceptions and dialogs since the start."""
        self.browser.listen(0.1)
        found = []
        for event in self._own_events():
            method, params = event["method"], event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif method == "Page.javascriptDialogOpening":
                found.append(f"dialog: {params['message']}")
        return found

    def requests(self) -> list[str]:
        """Addresses asked for, other than the page itself and what lies within it."""
        self.browser.listen(0.1)
        assert self.file is not None
        own = self.file.resolve().as_uri()
        asked = [
            event["params"]["request"]["url"]
            for event in self._own_events()
            if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked if url != own and not url.startswith(("data:", "about:"))]

    def close(self) -> None:
        """Close the tab."""
        self.browser.call("Target.closeTarget", {"targetId": self._target})

    def _own_events(self) -> list[dict[str, Any]]:
        return [event for event in self.browser.events if event.get("sessionId") == self._session]

    def _mouse(self, kind: str, x: float, y: float) -> None:
        params: dict[str, Any] = {"type": kind, "x": x, "y": y}
        if kind != "mouseMoved":
            params |= {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", params)


def _out_of_the_way(descriptor: int) -> int:
    """The same end of a pipe under a number above 9, so that 3 and 4 are free to be set."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
    os.close(descriptor)
    return moved
