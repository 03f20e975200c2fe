"""From a trained network to a shipped one in Python: defaults that fit the start, and a result that does the rest."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dllp
from dllp.cli.main import main
from dllp.config import LONG, Config
from dllp.data import ArrayData, Dataset
from dllp.errors import ConfigError, DataError, StructureError
from dllp.notebook import Live
from dllp.records import EpochRecord, best_epoch
from tests.support.commands import ENVIRONMENT


def network(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3),
    )  # fmt: skip


def images(count: int = 60) -> tuple[Tensor, Tensor]:
    y = torch.arange(count) % 3
    return torch.randn(count, 1, 7, 7) + 1.5 * (y - 1).view(-1, 1, 1, 1), y


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    model, (x, y) = network(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def result(trained: nn.Module) -> dllp.Result:
    torch.manual_seed(1)
    config = dllp.Config(keep_flops=0.6, epochs=3, batch_size=20, particles=2, device="cpu")
    return dllp.prune(trained, images(), config, validation=images(30))


# ---- names


def test_modules_with_public_names_are_there_without_an_import_of_their_own() -> None:
    names = "baselines.find, checkpoints.Checkpoints, data.load, export.export, result.Size, zoo.build"
    code = f"import dllp; [eval('dllp.' + name) for name in '{names}'.split(', ')]"
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, timeout=120)


# ---- defaults by the start


def test_a_trained_network_gets_its_schedule_and_any_other_the_long_one(trained: nn.Module) -> None:
    loader = DataLoader(TensorDataset(*images()), batch_size=20)
    for model, learned in ((trained, True), (network(), False)):
        found = dllp.prune(model, loader, dllp.Config(keep_flops=0.6, epochs=2, device="cpu"))
        wanted = Config(keep_flops=0.6, epochs=2, batch_size=20, device="cpu", round_to=8 if learned else 1)
        assert found.config == wanted.resolved(trained=learned, steps=3)
        assert (found.config.teacher, found.original is not None) == (("given", True) if learned else ("off", False))


def test_a_regression_that_has_learned_is_known() -> None:
    x = torch.randn(64, 4)
    line = nn.Linear(4, 1)
    with torch.no_grad():
        line.weight.copy_(torch.ones(1, 4))
        line.bias.zero_()
    model = nn.Sequential(nn.Linear(4, 4), line)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    config = dllp.Config(keep_flops=0.8, epochs=1, batch_size=32, task="regression", device="cpu")
    assert dllp.prune(model, (x, x.sum(1, keepdim=True)), config).config.teacher == "given"
    assert dllp.prune(model, (x, -x.sum(1, keepdim=True)), config).config.teacher == "off"


def test_rates_follow_examples_batch_and_steps() -> None:
    def of(batch: int, steps: int | None, **changes: Any) -> Config:
        return Config(**{"epochs": 30, **changes}).resolved(trained=True, batch_size=batch, steps=steps)

    assert of(512, None).lr == of(512, 98).lr == of(128, 391).lr == 0.1
    assert of(512, 19).lr == of(128, 8).lr == 0.2, "twice as high on a quarter of the examples and fewer"
    assert of(512, 40).lr == pytest.approx(0.1 * (40_000 / 20_480) ** 0.5)
    assert of(32, 2000).lr == pytest.approx(0.1 / 4**0.75), "in small batches it is lower"
    assert of(512, 5, epochs=20).lr == pytest.approx(0.2 / 2**0.75), "in few steps"
    assert of(128, 50, epochs=5).lr == pytest.approx(0.2 / 3**0.75), "and in few epochs"
    assert of(32, 100, optimizer="adamw").lr == 1e-3
    assert [of(64, steps, epochs=10).lr_gates for steps in (99, 100, None)] == [0.1, 0.05, 0.05]
    assert of(64, 10, lr=0.3).lr_end == pytest.approx(0.003)


def test_what_is_chosen_stays_and_defaults_keep_its_order() -> None:
    chosen = Config(discrete_at=0.2, lr=0.3, teacher="off", round_to=4, warmup=0.0).resolved(trained=True)
    assert (chosen.lr, chosen.teacher, chosen.round_to, chosen.warmup) == (0.3, "off", 4, 0.0)
    assert chosen.open_until <= chosen.ramp_until <= chosen.discrete_at == 0.2
    assert Config(open_until=0.6).resolved().discrete_at == 0.6
    plain = Config().resolved()
    assert all(getattr(plain, name) == value for name, value in LONG.items()) and not plain.unresolved


def test_a_settings_file_means_the_same_whatever_the_start(trained: nn.Module) -> None:
    stored = Config.from_dict(Config(keep_flops=0.6, epochs=2, batch_size=20, device="cpu").resolved().as_dict())
    assert dllp.prune(trained, images(), stored).config == stored


def test_the_teacher_that_is_handed_over_teaches(trained: nn.Module) -> None:
    config = dllp.Config(keep_flops=0.6, epochs=1, batch_size=20, device="cpu")
    assert dllp.prune(network(), images(), config, teacher=trained).config.teacher == "given"


def test_narrow_layers_and_small_budgets_keep_any_number_of_channels(trained: nn.Module) -> None:
    tight = dllp.Config(keep_flops=0.05, epochs=1, batch_size=20, device="cpu")
    assert dllp.prune(trained, images(), tight).config.round_to == 1
    narrow = dllp.Config(keep_flops=0.6, epochs=1, batch_size=20, device="cpu")
    assert dllp.prune(network(31), images(), narrow).config.round_to == 1


# ---- the result


def test_it_says_what_it_is_in_a_few_lines(result: dllp.Result) -> None:
    text = repr(result)
    assert text.count("\n") <= 6 and "particle 2: " in text and "budget: 60% of the FLOPs" in text
    assert "validation accuracy" in text and ".evaluate(" in text


def test_it_evaluates_any_form_of_data(result: dllp.Result) -> None:
    x, y = images(30)
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    found = result.evaluate(loader, ood={"far": 9 * x, "pair": (x, y)})
    assert [row.name for row in found.rows[:4]] == ["dense", "particle 1", "particle 2", "all particles"]
    assert found.rows[:4] == result.evaluate((x, y)).rows
    assert {row.data for row in found.rows} == {"clean", "ood:far", "ood:pair"}
    assert "accuracy" in repr(found) and repr(found).count("\n") == 11
    with pytest.raises(ConfigError, match="unknown out-of-distribution data"):
        result.evaluate((x, y), ood="nowhere")
    with pytest.raises(DataError, match="uint8"):
        result.evaluate((x, y), corrupt="sharpen")
    with pytest.raises(DataError, match="cannot be used"):
        result.evaluate(x)  # type: ignore[arg-type]


def test_it_is_exported_timed_and_shown(result: dllp.Result, tmp_path: Path) -> None:
    assert result.export(tmp_path / "network.onnx").difference < 1e-4
    data = Dataset("own", ArrayData(*images(20)), ArrayData(*images(30)), classes=tuple("012"))
    timed = result.speed(batches=[2], seconds=0.01, data=data)
    assert "x as fast as dense" in repr(timed) and ", accuracy " in repr(timed)
    accuracy = {row.network: row.accuracy for row in timed.rows if row.runtime == "onnxruntime"}
    found = result.evaluate(data).rows
    assert accuracy["dense"] == pytest.approx(found[0].metrics["accuracy"], abs=0.04)  # one of 30
    assert accuracy["pruned"] == pytest.approx(found[1].metrics["accuracy"], abs=0.04)
    page = result.report(tmp_path / "page.html", images(30)).read_text(encoding="utf-8")
    assert "Validation accuracy" in page and "The dense network is trained" not in page
    with pytest.raises(ConfigError, match="one shape of inputs: give example"):
        replace(result, shape=()).export(tmp_path / "a.onnx")


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
def test_what_is_saved_is_read_by_every_command(
    result: dllp.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder knows network, configuration and shape of inputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    result.save("run", model="tests.end_to_end.test_everyday:network")
    again = dllp.load("run", network())
    assert again.evaluate(images(30)).rows[0].name == "dense" and again.shape == (1, 7, 7)
    for words in (["analyze", "run", "--quiet"], ["export", "run", "--out", "a.pt2"], ["report", "run", "--quiet"]):
        assert main([*words, "--trust-imports"]) == 0
    result.save("bare")
    assert main(["export", "bare", "--out", "a.pt2"]) == 2 and "--model" in capsys.readouterr().err
    assert main(["export", "bare", "--out", "b.pt2", "--model", "tests.end_to_end.test_everyday:network"]) == 0


# ---- validation, progress


def test_validation_is_measured_each_epoch_and_the_best_is_named(result: dllp.Result, trained: nn.Module) -> None:
    records = [EpochRecord(**record) for record in result.history]
    assert all(len(r.validation_accuracy or ()) == len(r.validation_loss or ()) == 2 for r in records)
    last = [row.metrics for row in result.evaluate(images(30)).rows][1]
    assert len(records) == 3 and 0 <= last["accuracy"] <= 1
    marks = [replace(records[-1], epoch=e, validation_accuracy=[a]) for e, a in ((1, 0.5), (2, 0.9), (3, 0.7))]
    assert best_epoch(marks).epoch == 2
    errors = [replace(r, validation_accuracy=None, validation_loss=[v]) for r, v in zip(marks, (3, 2, 1), strict=True)]
    assert best_epoch(errors).epoch == 3


def test_a_part_can_be_held_out_for_validation(trained: nn.Module) -> None:
    config = dllp.Config(keep_flops=0.6, epochs=1, batch_size=16, device="cpu")
    seen: list[int] = []
    result = dllp.prune(trained, images(), config, validation=0.2, on_start=lambda s: seen.append(s.num_data))
    assert seen == [48] and result.history[0]["validation_accuracy"]
    dense = dllp.train_dense(trained, images(), config, validation=12)
    assert dense.history[0]["validation_accuracy"]
    with pytest.raises(DataError, match="cannot be held out of a DataLoader"):
        dllp.prune(trained, DataLoader(TensorDataset(*images()), batch_size=20), config, validation=0.2)


def test_raw_images_are_normalised_in_an_export_as_they_were_in_training(tmp_path: Path) -> None:
    """Also after the run was saved and loaded."""
    raw, y = torch.randint(0, 256, (60, 1, 7, 7), dtype=torch.uint8), torch.arange(60) % 3
    data = ArrayData(raw, y, mean=(0.4,), std=(0.2,))
    found = dllp.prune(network(), data, keep_flops=0.6, epochs=1, batch_size=20, init="fresh", device="cpu")
    found.save(tmp_path / "run")
    expected = found.model(data.inputs(slice(0, 4)))
    for k, each in enumerate((found, dllp.load(tmp_path / "run", network()))):
        each.export(tmp_path / f"{k}.pt2", uint8=True)
        torch.testing.assert_close(torch.export.load(tmp_path / f"{k}.pt2").module()(raw[:4]), expected)


class Terminal:
    """Standard error of a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_only(trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dllp.Config(keep_flops=0.6, epochs=2, batch_size=20, device="cpu")
    for progress, ends in ((True, "\n"), (False, "")):
        terminal: Any = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        dllp.prune(trained, images(), config, progress=progress)
        assert terminal.text[-1:] == ends and ("epoch 2/2" in terminal.text) == progress
    assert isinstance(Live(), Live)


# ---- traps


def test_hooks_on_gradients_and_networks_without_numbers_are_refused() -> None:
    model = network()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(StructureError, match=r"'0.weight' has a hook on its gradient"):
        dllp.prune(model, images())
    with torch.device("meta"):
        empty = network()
    with pytest.raises(StructureError, match="on the meta device"):
        dllp.prune(empty, images())


@pytest.mark.parametrize(("targets", "words"), [
    (torch.tensor([[1.0, 1.0, 0.0]] * 60), "several labels at once: use task = binary"),
    (torch.randn(60, 3), "use task = regression"),
])  # fmt: skip
def test_real_targets_of_a_classification_get_advice_that_fits(targets: Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        dllp.prune(network(), (images()[0], targets))


def test_an_ending_that_nobody_writes_is_refused(result: dllp.Result, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no export to \.tflite"):
        result.export(tmp_path / "a.tflite")
