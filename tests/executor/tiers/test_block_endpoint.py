"""Where an executor listens for others that fetch its blocks, and by which name they find it."""

from pathlib import Path

import pytest
from pagewise_executor.tiers.block_endpoint import block_listener
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ConfigError


@pytest.mark.parametrize("scheduler", ["tcp://127.0.0.1:5757", "ipc:///tmp/folder/executors.sock"])
def test_a_file_that_says_where_the_scheduler_is_counts_as_what_is_in_it(tmp_path: Path, scheduler: str) -> None:
    file = tmp_path / "scheduler"
    file.write_text(f"{scheduler}\n")
    listen, host = block_listener(ExecutorConfig(scheduler=f"file:{file}"))
    assert host == "127.0.0.1"
    assert listen.startswith("tcp://127.0.0.1:" if scheduler.startswith("tcp") else "ipc:///tmp/folder/executors.sock-")


def test_without_that_file_no_address_is_made_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scheduler cannot be read"):
        block_listener(ExecutorConfig(scheduler=f"file:{tmp_path}/scheduler"))
