"""``pagewise-executor`` whose thread that stores blocks in host memory ends by an exception at its first store.

python -m tests.e2e.broken_host_tier MODEL [OPTIONS]
"""

import sys
from typing import NoReturn

from pagewise_executor.main import main


class _Fault(BaseException):
    """Nothing that copies handles it."""


def _break(*_: object) -> NoReturn:
    raise _Fault("the link is broken")


if __name__ == "__main__":
    from pagewise_executor.tiers.host import HostTier

    HostTier._store = _break  # type: ignore[method-assign]
    sys.exit(main())
