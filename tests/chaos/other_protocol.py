"""``pagewise-executor --simulate`` of another major version of the protocol."""

import sys

from pagewise_executor import main, service

if __name__ == "__main__":
    service.PROTOCOL_MAJOR += 1
    sys.exit(main.main(["--simulate", *sys.argv[1:]]))
