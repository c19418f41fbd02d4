"""A user's first steps after the installation: ``pagewise serve``, a request, Ctrl-C. Prints the result as JSON.

``python first_request.py BIN``, the folder of the commands. Needs nothing but the standard library.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "tcc", "zig", "make")


def main(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines: list[str] = []
    began = time.monotonic()
    command = [folder / "pagewise", "serve", "--port", str(port), "--kv-memory", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        reader = threading.Thread(target=lambda stream: lines.extend(stream), args=(server.stdout,))
        reader.start()
        url = f"http://127.0.0.1:{port}"
        while not _answers(f"{url}/health"):
            assert server.poll() is None, "".join(lines)
            assert time.monotonic() - began < 300, "".join(lines)
            time.sleep(0.2)
        ready = time.monotonic() - began
        body = {"model": "pagewise-demo", "prompt": "import os\n", "max_tokens": 16, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = json.load(answer)["choices"][0]["text"]
        console = _status(f"{url}/")
        server.send_signal(signal.SIGINT)
        code = server.wait(60)
        reader.join()
    print(
        json.dumps(
            {
                "code": code,
                "text": text,
                "ready": ready,
                "console": console,
                "user": os.getuid(),
                "compilers": [name for name in COMPILERS if shutil.which(name)],
                "network": _reaches_out(),
                "log": lines,
            }
        )
    )


def _answers(url: str) -> bool:
    return _status(url) == 200


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _reaches_out() -> bool:
    """Whether packets leave this machine: without a network there is no way to any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return False
        return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
