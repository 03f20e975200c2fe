"""`make audit`: known vulnerabilities of the pinned versions, by pip-audit.

A database that cannot be reached is told and skipped (exit 0): pip-audit itself calls a package it could not look up
"not found" and ends with "No known vulnerabilities", which would be a pass that means nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SERVICES = ("pypi", "osv")


def audited(service: str, constraints: Path) -> list[dict] | None:
    """What pip-audit found out about each package that it could look up; None where it could not run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "audit.json"
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "15", "-f", "json"]
        command = [sys.executable, "-m", "pip_audit", "-s", service, "-r", str(constraints), *options, "-o", str(out)]
        try:
            subprocess.run(command, capture_output=True, check=False, timeout=300)
            found = json.loads(out.read_bytes())["dependencies"]
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return None
    return [package for package in found if "skip_reason" not in package]


def main(constraints: Path) -> int:
    pinned = sum("==" in line for line in constraints.read_text().splitlines())
    for service in SERVICES:
        found = audited(service, constraints)
        if found:
            bad = [(package, flaw) for package in found for flaw in package["vulns"]]
            for package, flaw in bad:
                print(f"{package['name']} {package['version']}: {flaw['id']}, fixed in {flaw['fix_versions']}")
            print(f"audit: {len(found)} of {pinned} pinned packages looked up at {service}, {len(bad)} vulnerabilities")
            return 1 if bad else 0
    print(f"audit: SKIPPED, no vulnerability database can be reached from here: 0 of {pinned} packages looked up")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(__file__).parents[2] / "constraints.txt"))
