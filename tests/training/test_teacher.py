"""A teacher beside the labels: whom the particles follow, and which teachers are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dllp
from dllp.errors import ConfigError, DataError, StructureError

OPTIONS: dict[str, Any] = dict(keep_flops=0.6, epochs=20, batch_size=32, lr=0.05, warmup=0, device="cpu")


class Always(nn.Module):
    """The same answer to everything, by parameters that a run may not change."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = nn.Parameter(answer)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer.expand(len(x), -1)


def table(classes: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 4, generator=generator)
    return x, ((x[:, 0] > 0).long() if classes else x[:, :1])


def network(outputs: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))


@pytest.mark.parametrize("verb", [dllp.prune, dllp.train_dense])
def test_particles_follow_a_teacher_that_weighs_more_than_the_labels(verb: Any) -> None:
    teacher = Always(torch.tensor([3.0, 0.0, 1.0]))
    config = dllp.Config(**OPTIONS, teacher="given", teacher_weight=0.99, teacher_temperature=1.0)
    result = verb(network(3), table(), config, teacher=teacher)
    found = result.posterior.predict(table()[0]).mean.mean(0)
    torch.testing.assert_close(found, torch.tensor([3.0, 0.0, 1.0]).softmax(0), atol=0.05, rtol=0)
    assert torch.equal(teacher.answer.detach(), torch.tensor([3.0, 0.0, 1.0])), "it is frozen"
    assert teacher.answer.requires_grad, "and left as it was"


def test_a_regression_follows_its_teachers_outputs() -> None:
    config = dllp.Config(**OPTIONS, task="regression", teacher="given", teacher_weight=0.99)
    result = dllp.prune(network(1), table(classes=False), config, teacher=Always(torch.tensor([7.0])))
    assert float(result.posterior.predict(table()[0]).mean.mean()) == pytest.approx(7.0, abs=0.3)


def test_the_given_network_teaches_by_default_and_begins_when_it_is_asked_to() -> None:
    """Before `teacher_from` the steps are those without a teacher, to the last bit."""
    given, steps = network(2), {}
    phases = dict(lr_end=0.001, lr_gates=0.05, open_until=0.1, ramp_until=0.3, discrete_at=0.5)
    for name, changes in {"off": {"teacher": "off"}, "late": {"teacher": "given", "teacher_from": 0.5}}.items():
        rows: list[Tensor] = []
        config = dllp.Config(**OPTIONS, **phases, **changes)  # type: ignore[arg-type]
        dllp.prune(given, table(), config, on_step=lambda run, rows=rows: rows.append(run.particles.rows.clone()))
        steps[name] = rows
    half = len(steps["off"]) // 2
    equal = [torch.equal(a, b) for a, b in zip(steps["off"], steps["late"], strict=True)]
    assert all(equal[:half]) and not any(equal[half + 1 :])


def test_teachers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(StructureError, match=r"the teacher gives outputs of shape \(3,\), the network \(2,\): both"):
        dllp.prune(network(2), table(), dllp.Config(**OPTIONS, teacher="given"), teacher=Always(torch.zeros(3)))
    with pytest.raises(ConfigError, match="a teacher is handed over, but teacher = off"):
        dllp.prune(network(2), table(), dllp.Config(**OPTIONS, teacher="off"), teacher=Always(torch.zeros(2)))


def test_validation_that_does_not_fit_is_refused_before_training() -> None:
    with pytest.raises(DataError, match=r"validation inputs of shape \(5,\), but those of training have \(4,\)"):
        dllp.prune(network(2), table(), dllp.Config(**OPTIONS), validation=(torch.zeros(3, 5), torch.zeros(3).long()))


class Encoder(nn.Module):
    """Returns its middle activations, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 24), nn.Linear(24, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.middle(self.first(x).relu())
        return self.last(hidden.relu()), hidden


def test_hidden_activations_are_taught() -> None:
    """Logits alone do not tell where the middle should go."""
    torch.manual_seed(0)
    given, (x, y) = Encoder(), table()
    other = copy.deepcopy(given)
    with torch.no_grad():
        other.middle.bias += 2.0

    def loss(network: nn.Module, batch: Any) -> dict[str, Any]:
        logits, hidden = network(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits, "hidden": hidden}

    def distance(network: nn.Module) -> float:
        with torch.no_grad():
            return float(F.mse_loss(network(x)[1], other(x)[1]))

    def kept(module: nn.Module, name: str) -> bool:
        return name != "middle"

    config = dllp.Config(**OPTIONS, teacher="given", teacher_weight=0.9)
    taught = dllp.prune(given, (x, y), config, loss=loss, teacher=other, filter_fn=kept)
    alone = dllp.prune(
        given, (x, y), config, teacher=other, filter_fn=kept,
        loss=lambda network, batch: {k: v for k, v in loss(network, batch).items() if k != "hidden"},
    )  # fmt: skip
    assert taught.widths["first"][0] < 24
    assert distance(taught.model) < 0.2 * distance(alone.model)


class Remembering(Encoder):
    """Keeps its middle to itself, where it can be cut."""

    def forward(self, x: Tensor) -> Tensor:
        logits, self.seen = super().forward(x)
        return logits


def test_hidden_activations_that_are_cut_are_one_line() -> None:
    def loss(network: Any, batch: Any) -> dict[str, Any]:
        logits = network(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits, "hidden": [network.seen]}

    config = dllp.Config(**OPTIONS, teacher="given")
    with pytest.raises(StructureError, match=r"hidden activations of shapes .*keep them whole with filter_fn"):
        dllp.prune(Remembering(), table(), config, loss=loss)
