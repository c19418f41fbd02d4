"""Processes of the server that keep failing: reports to gateways, and metrics."""

from pathlib import Path

from pagewise_shared.service_status import ServiceStatus, write_status

from tests.scheduler.server.stack import running, until


async def test_gateways_are_told_which_processes_keep_failing(tmp_path: Path) -> None:
    file = tmp_path / "services.json"
    async with running(tmp_path, service_status=str(file)) as stack:
        assert stack.gateway.fleet.problems == ()
        write_status(file, {"executor-1": ServiceStatus(4, "ended 4 times in a row"), "gateway-0": ServiceStatus(1)})
        await until(lambda: stack.gateway.fleet.problems == ("executor-1: ended 4 times in a row",))
        assert stack.metric("service_restarts_total", service="executor-1") == 4
        assert stack.metric("service_failing", service="executor-1") == 1
        assert stack.metric("service_failing", service="gateway-0") == 0
        file.write_text("nonsense")  # changes nothing
        write_status(file, {"executor-1": ServiceStatus(5)})
        await until(lambda: stack.gateway.fleet.problems == ())
        assert stack.metric("service_restarts_total", service="executor-1") == 5
        assert stack.metric("service_failing", service="executor-1") == 0
