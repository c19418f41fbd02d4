"""Services and their own process."""

import subprocess
import sys

import pytest

CHURN = """
import sys, time
from pagewise_shared import service_process

def resident():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024

size, tuned = int(sys.argv[1]), sys.argv[2]
service_process._TRIM_SECONDS = 0.1
if tuned != "as it is":
    service_process.tune_allocator(computes=tuned == "computes")
before = resident()
large, buffers, others = bytes(30_000_000), [], []
del large  # glibc now takes buffers up to this size from its heap
for _ in range(100_000_000 // size):
    buffers.append(bytearray(b"x" * size))
    others.append(bytes(2000))  # lives on behind the buffer
del buffers
deadline = time.monotonic() + 10
while resident() - before > 5 and tuned != "as it is" and time.monotonic() < deadline:
    time.sleep(0.05)
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize("size", [50_000, 1_000_000])
def test_freed_buffers_go_back_to_the_operating_system(size: int) -> None:
    grown = {
        how: float(subprocess.run([sys.executable, "-c", CHURN, str(size), how], stdout=-1, check=True).stdout)
        for how in ("as it is", "computes", "does not compute")
    }
    assert grown["as it is"] > 25, "glibc has learned it"
    assert grown["computes"] < 15
    assert grown["does not compute"] < 15
