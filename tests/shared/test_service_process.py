"""What services do about their own process."""

import subprocess
import sys

import pytest

CHURN = """
import sys
from pagewise_shared.service_process import tune_allocator

def resident():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024

if sys.argv[1] == "tuned":
    tune_allocator()
before = resident()
large, small = bytes(30_000_000), []
del large  # glibc now takes buffers up to this size from its heap
for _ in range(100):
    bodies = [bytes(1_000_000) for _ in range(100)]
    small.append(bytes(2000))  # lives on, behind the buffers
    del bodies
many = []
for _ in range(100):
    many.append(bytearray(b"x" * 1_000_000))
    small.append(bytes(2000))
del many
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_buffers_go_back_to_the_operating_system() -> None:
    grown = {
        how: float(subprocess.run([sys.executable, "-c", CHURN, how], stdout=subprocess.PIPE, check=True).stdout)
        for how in ("as it is", "tuned")
    }
    assert grown["tuned"] < 5.0 < grown["as it is"]
