"""``pagewise-gateway`` as it would be if it looked for no repeated text, for the comparison in ``run``."""

import sys

from pagewise_gateway.link import repeat_watch
from pagewise_gateway.main import main

if __name__ == "__main__":
    repeat_watch.SHORTEST_PROMPT = 1 << 62
    sys.exit(main())
