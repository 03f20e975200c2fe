"""No file takes more than twice the memory that its checked header declares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bombs import MB, SLACK

from tests.support.commands import ENVIRONMENT

WHOLE = ("64 MB of tensors", "64 MB of images", "64 MB of numbers")


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory cannot be read here")
def test_memory_stays_within_twice_what_the_header_declares(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("bombs.py")), str(tmp_path)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=ENVIRONMENT, timeout=600)
    found = json.loads(done.stdout)
    assert len(found) > 15
    for name, (declared, peak, outcome) in found.items():
        assert peak <= 2 * declared + SLACK, f"{name}: {peak / MB:.0f} MB for {declared / MB:.0f} MB"
        assert (outcome == "taken") == (name in WHOLE), f"{name}: {outcome}"
        assert outcome == "taken" or "Error: " in outcome
