"""Whole jobs of the compared methods on a CUDA device, their steps captured."""

from __future__ import annotations

import pytest

from dllp.baselines import DYNAMIC, find_any
from paper.jobs import Job, Runner
from tests.support.short_runs import DIGITS

NAMES = (
    "ccp", "ccp:inputs=1", "dcp:images=256,rounds=4", "amc:episodes=8,warmup=4,images=256", "fbs", "liws:after=2",
    "rnp", "rnp:fixed=2",
)  # fmt: skip


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("network", ["small_cnn", "resnet20"])
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_job_on_cuda(name: str, network: str) -> None:
    job = Job(network, "baseline", keep=0.7, epochs=4, finetune=6, baseline=name, changes={"batch_size": 64, "lr": 0.1})
    line = Runner(DIGITS, device="cuda", precision="bfloat16").run(job).line
    assert line["device"] == "cuda" and line["config"]["precision"] == "bfloat16"
    assert 0.2 < line["flops_removed"][0] < 0.8 and line["particles"][0]["accuracy"] > 0.5
    engines = {record["engine"] for record in line["history"]}
    assert engines == {"graph"}
    dynamic = find_any(name).name in DYNAMIC
    assert len(line["history"]) == (6 if dynamic else 10)


def test_every_method_that_chooses_with_labels_or_by_image_is_here() -> None:
    assert {find_any(name).name for name in NAMES} == {"ccp", "dcp", "amc", *DYNAMIC}
