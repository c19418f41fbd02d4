"""The containers' health checks, outside a container."""

import http.server
import os
import socket
import subprocess
import sys
import threading


def check(kind: str, **environ: str) -> int:
    command = [sys.executable, "-m", "pagewise.healthcheck", kind]
    return subprocess.run(command, env=os.environ | environ, timeout=30).returncode


def test_an_executor_is_healthy_while_its_connection_to_the_scheduler_stands() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        endpoint = f"tcp://127.0.0.1:{port}"
        assert check("executor", PAGEWISE_SCHEDULER=endpoint) == 1
        with socket.create_connection(("127.0.0.1", port)):
            assert check("executor", PAGEWISE_SCHEDULER=endpoint) == 0


def test_a_scheduler_is_healthy_while_it_listens_on_both_sides() -> None:
    with socket.create_server(("127.0.0.1", 0)) as executors:
        one = {"PAGEWISE_LISTEN": f"tcp://0.0.0.0:{executors.getsockname()[1]}"}
        with socket.create_server(("127.0.0.1", 0)) as gateways:
            both = one | {"PAGEWISE_LISTEN_GATEWAYS": f"tcp://0.0.0.0:{gateways.getsockname()[1]}"}
            assert check("scheduler", **both) == 0
        assert check("scheduler", **both) == 1


def test_a_gateway_is_healthy_while_it_answers() -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/version" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert check("gateway", PAGEWISE_PORT=str(server.server_port)) == 0
            assert check("gateway", PAGEWISE_PORT=str(server.server_port), PAGEWISE_SSL_CERTFILE="x") == 1
        finally:
            server.shutdown()
            thread.join()
    assert check("gateway", PAGEWISE_PORT=str(server.server_port)) == 1


def test_other_endpoints_are_not_judged() -> None:
    assert check("executor", PAGEWISE_SCHEDULER="ipc:///tmp/scheduler") == 0
    ipc = {"PAGEWISE_LISTEN": "ipc:///tmp/a", "PAGEWISE_LISTEN_GATEWAYS": "ipc:///tmp/b"}
    assert check("scheduler", **ipc) == 0
