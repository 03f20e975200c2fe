"""The test images that the particles doubt most, as pictures inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from dllp.data import ArrayData
from dllp.evaluation.examples import Examples
from dllp.report.names import html_text

SHOWN, LARGEST = 12, 160
"""Images of each kind, and the longer side of what is embedded."""
Doubt = Literal["aleatoric", "epistemic"]


@dataclass(frozen=True)
class Picture:
    """One test image: why it is shown, how much doubt, its PNG, and what was said about it."""

    kind: Doubt
    doubt: float
    png: bytes
    index: int
    truth: str
    answer: str
    confidence: float


def pictures(found: Examples, data: ArrayData, classes: Sequence[str]) -> list[Picture]:
    """The most doubted images of each kind; none where the inputs are no images."""
    if data.x.ndim != 4 or data.x.shape[1] not in (1, 3) or len(data) != len(found.labels):
        return []
    chosen = []
    for kind in ("aleatoric", "epistemic"):
        doubt: Tensor = getattr(found, kind)
        if float(doubt.max()) <= 0:  # a single particle knows no ignorance
            continue
        for index in doubt.argsort(descending=True)[:SHOWN].tolist():
            chosen.append(
                Picture(
                    kind=kind,
                    doubt=float(doubt[index]),
                    png=_png(data.x[index].cpu()),
                    index=index,
                    truth=_name(int(found.labels[index]), classes),
                    answer=_name(int(found.predicted[found.together][index]), classes),
                    confidence=float(found.confidence[found.together][index]),
                )
            )
    return chosen


def markup(pictures: Sequence[Picture], kind: Doubt) -> str:
    """The images of one kind as a list with captions."""
    items = []
    for p in pictures:
        if p.kind == kind:
            answer, truth = html_text(p.answer, 40), html_text(p.truth, 40)
            right = p.answer == p.truth
            said = f"{'✓' if right else '✗'} <bdi>{answer}</bdi> {100 * p.confidence:.0f}%"
            said += "" if right else f"<br>is <bdi>{truth}</bdi>"
            source = "data:image/png;base64," + base64.b64encode(p.png).decode()
            alt = f"test image {p.index}, class {truth}, answered {answer}"
            items.append(f'<li><img src="{source}" alt="{alt}" width="72" height="72"><span>{said}</span></li>')
    return f'<ul class="gallery">{"".join(items)}</ul>' if items else ""


def _png(image: Tensor) -> bytes:
    if image.dtype != torch.uint8:
        low, high = float(image.min()), float(image.max())
        image = ((image - low) / max(high - low, 1e-12) * 255).round().to(torch.uint8)
    pixels = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((LARGEST, LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _name(index: int, classes: Sequence[str]) -> str:
    return classes[index] if 0 <= index < len(classes) else str(index)
