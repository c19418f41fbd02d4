"""Fuzzing guided by coverage: atheris drives one of the tests of this folder (``make fuzz``, if atheris is installed).

It sees Python code only, such as that of the input batch. The decoder of the wire is C and gains nothing by it.

    python -m tests.fuzz.guided -max_total_time=60
"""

import sys

import atheris

with atheris.instrument_imports(include=["pagewise_executor", "pagewise_shared"]):
    from pagewise_executor import input_batch, plan_checks  # noqa: F401 - modules whose branches guide the fuzzer

from tests.fuzz.test_plans import test_what_the_input_batch_accepts_stays_inside_the_pool as plans

if __name__ == "__main__":
    atheris.Setup(sys.argv, atheris.instrument_func(plans.hypothesis.fuzz_one_input))
    atheris.Fuzz()
