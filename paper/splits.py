"""What jobs train on, and every version of the data that they are evaluated on."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllp.data import ArrayData, Dataset, StreamedData, holdout, ood, stratified
from dllp.data.corruptions import parse
from paper.store import OUTSIDE

if TYPE_CHECKING:
    from paper.jobs import Job

Split = ArrayData | StreamedData
KEPT = ("dense", "dllp", "l1-filters")
"""Methods and baselines whose predictions are looked at on every version of the test set."""
CORRUPTIONS = ("gaussian-blur:1,2,3,5", "sharpen")
CLEAN = "clean"
FAR = (ood.NOISE, "digits")
MOST_OUTSIDE = 2000
"""Inputs from elsewhere that are kept of each kind: areas under curves are good to a percent with them."""


class Splits:
    """The parts of one data set, in memory or streamed.

    Args:
        everywhere: Whether the methods above are evaluated on every version of the test set, or on the clean one only.
    """

    def __init__(self, data: Dataset, everywhere: bool = True) -> None:
        self.data, self.everywhere = data, everywhere

    @cached_property
    def described(self) -> dict[str, Any]:
        """The data in short: runs on other data do not belong into the same table."""
        data = self.data
        name, shape = Path(data.name).name, list(data.train.shape)
        return {"name": name, "train": len(data.train), "classes": data.num_classes, "shape": shape}

    def of(self, job: Job) -> tuple[Split, dict[str, ArrayData]]:
        """Training data, and every version of the data to evaluate on; a held-out part is the same for every seed."""
        train, test, versions = self.data.train, self.data.test, {CLEAN: self.data.test}
        if job.augment:
            train = replace(train, augment=job.augment)
        if job.without:
            train, _ = ood.leave_out(train, self.data.classes, job.without)
            test, left = ood.leave_out(test, self.data.classes, job.without)
            versions = {CLEAN: test, OUTSIDE + ood.LEFT_OUT: left, **self._far(test)}
        elif self._looked_at(job):
            versions = self.test_versions
        if job.validation:
            train, held = holdout(train, job.validation, seed=0)
            versions = {CLEAN: held.decoded() if isinstance(held, StreamedData) else held}
        if job.fraction < 1:
            train = train.subset(stratified(train.y.cpu(), round(job.fraction * len(train)), job.seed))
        return train, versions

    def _looked_at(self, job: Job) -> bool:
        """Whether corrupted and foreign inputs are for it; copies of a test set that needs streaming are too many."""
        wanted = (job.baseline or job.method) in KEPT and job.granularity == "channel" and not job.validation
        return wanted and self.everywhere and isinstance(self.data.train, ArrayData)

    @cached_property
    def test_versions(self) -> dict[str, ArrayData]:
        """The clean test set and its corrupted versions, then inputs from elsewhere."""
        everything = [corruption for text in CORRUPTIONS for corruption in parse(text)]
        corrupted = {c.name: c.apply_to(self.data.test) for c in everything}
        return {CLEAN: self.data.test, **corrupted, **self._far(self.data.test)}

    def _far(self, test: ArrayData) -> dict[str, ArrayData]:
        found = {name: ood.find(name, test) for name in FAR}
        return {OUTSIDE + name: data.subset(range(min(len(data), MOST_OUTSIDE))) for name, data in found.items()}
