"""A headless Chromium for tests of pages, driven through its DevTools protocol over two pipes.

It needs no package of its own: the browser reads JSON messages from its file descriptor 3 and writes them to 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
PATIENCE = 120  # seconds that an answer may take
KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Space": ("Space", 32, " "),
    "ArrowDown": ("ArrowDown", 40, ""),
}


def binary():
    """The path of a Chromium or Chrome; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser. profile: an empty folder for its files."""

    def __init__(self, profile, width=1280, height=900):
        to_browser, from_us = os.pipe()
        to_us, from_browser = os.pipe()
        command = [binary(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *command],
            pass_fds=[to_browser, from_browser],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.writes, self.reads = from_us, to_us
        self.unread, self.number, self.session = b"", 0, None
        self.errors, self.requests = [], []  # of the page's console; addresses that it asked for
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=PATIENCE)
        os.close(self.writes)
        os.close(self.reads)

    def message(self, until):
        """The next message of the browser. TimeoutError if none comes by then."""
        while b"\0" not in self.unread:
            if not select.select([self.reads], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            some = os.read(self.reads, 1 << 16)
            if not some:
                raise EOFError("the browser has ended")
            self.unread += some
        first, _, self.unread = self.unread.partition(b"\0")
        return json.loads(first)

    def call(self, method, **params):
        """The result of a command. RuntimeError if the browser refuses it."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": params}
        command |= {"sessionId": self.session} if self.session else {}
        os.write(self.writes, json.dumps(command).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            message = self.message(until)
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.note(message)

    def note(self, event):
        """Keeps what an event says of errors and requests."""
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def run(self, program):
        """The JSON value of a JavaScript expression; a promise is awaited. RuntimeError if it throws."""
        answer = self.call("Runtime.evaluate", expression=program, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, condition):
        """Waits until a JavaScript expression is true."""
        until = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {condition}")
            time.sleep(0.1)

    def open(self, address):
        """Loads a page anew, also if only what is behind # differs."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.call("Page.navigate", url=address)
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def resize(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def dark(self, dark=True):
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def press(self, key):
        """Presses and releases a key of KEYS, or types a letter."""
        code, number, text = KEYS.get(key, (f"Key{key.upper()}", ord(key[0].upper()), key))
        what = {"key": " " if key == "Space" else key, "code": code, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **what)
        self.call("Input.dispatchKeyEvent", type="keyUp", **what)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
