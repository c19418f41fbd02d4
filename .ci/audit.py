"""Look the pinned dependencies up in the database of known vulnerabilities (pip-audit, over the network).

A vulnerability is a failure. A look-up that fails is printed, and is no failure: a machine without network can run the
rest of ``make lint``. With ``--strict`` as the first argument (``make audit``, and CI) it is a failure too.
"""

import json
import subprocess
import sys

UNREACHABLE = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "ServiceError", "HTTPError")
"""Names in the last line of pip-audit when it got no answer."""


def main(arguments: list[str]) -> int:
    """Run pip-audit, as the arguments say how; returns the exit code."""
    strict = arguments[:1] == ["--strict"]
    command = arguments[strict:]
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 - the Makefile's arguments
    if not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        if any(name in last for name in UNREACHABLE):
            print(f"pip-audit: NOTHING WAS AUDITED, the vulnerability service cannot be reached: {last}")
            return 1 if strict else 0
        print(f"pip-audit failed: {done.stderr.strip()}")
        return 1
    packages = json.loads(done.stdout)["dependencies"]
    skipped = [package for package in packages if "skip_reason" in package]
    found = [(package, each) for package in packages for each in package.get("vulns", [])]
    for package, each in found:
        fixed = ", ".join(each["fix_versions"]) or "none yet"
        print(f"pip-audit: {package['name']} {package['version']} has {each['id']}; fixed in: {fixed}")
    print(
        f"pip-audit: {len(packages) - len(skipped)} of {len(packages)} packages audited, {len(found)} vulnerabilities"
    )
    if skipped:
        print(f"pip-audit: {len(skipped)} WERE NOT AUDITED, the first: {skipped[0]['skip_reason']}")
    return 1 if found or (strict and skipped) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
