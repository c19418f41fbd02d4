"""``pagewise-executor --simulate`` of another major version of the protocol."""

import sys

from pagewise_executor import main, simulated

if __name__ == "__main__":
    simulated.PROTOCOL_MAJOR += 1
    sys.exit(main.main(["--simulate", *sys.argv[1:]]))
