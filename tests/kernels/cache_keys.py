"""Prints the keys of all kernels in Triton's cache. A process of its own runs it:

    python -m tests.kernels.cache_keys ORDER

ORDER: "forwards" or "backwards", in which they are computed.
"""

import importlib
import json
import os
import pkgutil
import sys

os.environ.pop("TRITON_INTERPRET", None)

import pagewise_kernels

KERNELS = {
    name: kernel
    for module in pkgutil.walk_packages(pagewise_kernels.__path__, "pagewise_kernels.")
    if ".cpu" not in module.name
    for name, kernel in vars(importlib.import_module(module.name)).items()
    if name.endswith("_kernel") and hasattr(kernel, "fn")  # no module
}

if __name__ == "__main__":
    order = sorted(KERNELS, reverse=sys.argv[1] == "backwards")
    print(json.dumps({name: KERNELS[name].cache_key for name in order}))
