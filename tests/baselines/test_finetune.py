"""Fine-tuning in widths that a device likes: dead channels change nothing; and with a teacher."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from dllp.api import train_dense
from dllp.baselines import METHODS, find, run
from dllp.cli.main import main
from dllp.config import Config
from dllp.structure.groups import discover
from dllp.structure.padding import fill
from dllp.structure.slicing import cut, kept_indices, recipe
from dllp.zoo import small_cnn, small_resnet
from tests.support.networks import FAMILIES
from tests.support.short_runs import DIGITS

SHORT = Config(keep_flops=0.4, epochs=1, batch_size=32, init="fresh", lr=0.1, seed=3, device="cpu")


@pytest.mark.parametrize("build, name", [(small_cnn, "l1-filters"), (small_cnn, "cp"), (small_resnet, "slimming")])
def test_dead_channels_change_nothing(build, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, trained = DIGITS.train.subset(range(128)), []
    network = partial(build, 10, in_channels=1)

    def watched(verb, stage, model, data, config):
        return verb(model, data, config, on_start=lambda state: trained.append(state.particles.networks[0]))

    laned = run.prune(find(name), network(), data, SHORT, finetune_epochs=2, train=watched)
    monkeypatch.setattr(run, "MULTIPLE", 1)
    plain = run.prune(find(name), network(), data, SHORT, finetune_epochs=2, train=watched)

    widths = {m.out_channels for m in trained[1].modules() if isinstance(m, torch.nn.Conv2d)}
    narrow = {m.out_channels for m in trained[-1].modules() if isinstance(m, torch.nn.Conv2d)}
    assert any(width % 8 for width in narrow) and not any(width % 8 for width in widths)
    tensors = (pruned.result.model.state_dict() for pruned in (plain, laned))
    for (name, a), b in zip(next(tensors).items(), next(tensors).values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, msg=name)
    losses = [[record["loss"] for record in pruned.result.history] for pruned in (plain, laned)]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-4, atol=1e-5)
    x = data.inputs(slice(0, 8))
    torch.testing.assert_close(laned.result.posterior.predict(x).mean, plain.result.posterior.predict(x).mean)
    assert laned.result.sizes == plain.result.sizes


@pytest.mark.parametrize("name", FAMILIES)
def test_a_widened_network_computes_the_same_however_channels_are_coupled(name: str) -> None:
    torch.manual_seed(0)
    family = FAMILIES[name]
    whole, x = family.build().double().eval(), family.example()
    x = x.double() if x.is_floating_point() else x
    structure = discover(whole, x)
    keep = torch.rand(structure.units) < 0.6
    for part in structure.slices:
        keep[part.start] = True
    small = cut(whole, recipe(whole, structure.groups, keep))
    with torch.no_grad():
        for tensor in (*small.parameters(), *small.buffers()):  # repaired since the cut
            if tensor.is_floating_point():
                tensor.mul_(1.1)
    wide, inner = run.widen(whole, structure, keep)
    fill(wide, small, kept_indices(wide, inner))
    torch.testing.assert_close(wide(x), small(x), rtol=1e-12, atol=1e-12)
    again = cut(wide, inner).state_dict()
    assert all(torch.equal(again[key], value) for key, value in small.state_dict().items())


# ---- a teacher: the whole network, as it was before the cut


@pytest.mark.parametrize("name", ["l1-filters", "magnitude-l2"])
def test_a_taught_network_follows_its_teacher(name: str) -> None:
    """The trained network answers 7 whatever it sees; whoever learns from labels leaves that, its pupil does not."""
    data, config = DIGITS.train.subset(range(256)), replace(SHORT, init="given")
    trained = train_dense(small_cnn(10, in_channels=1), data, replace(config, particles=1, keep_flops=None))
    head = next(m for m in trained.model.modules() if isinstance(m, torch.nn.Linear))
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(3.0 * (torch.arange(10) == 7))
    constant = head.bias.detach().softmax(0)

    def tuned(**teacher: object) -> run.Pruned:
        taught = replace(config, **teacher)  # pyright: ignore[reportArgumentType]
        return run.prune(find(name), trained.model, data, taught, finetune_epochs=4, trained=trained)

    x = DIGITS.test.inputs(slice(0, 64))
    alone, taught = tuned(), tuned(teacher="given", teacher_weight=0.999)
    far, near = ((p.result.posterior.predict(x).mean - constant).abs().max() for p in (alone, taught))
    assert near < 0.02 < 0.2 < far
    assert (taught.before.config.teacher, taught.result.config.teacher) == ("off", "given")


def test_the_training_before_the_cut_has_no_teacher() -> None:
    data, teachers = DIGITS.train.subset(range(64)), []

    def watched(verb, stage, model, data, config):
        return verb(model, data, config, on_start=lambda state: teachers.append((stage, state.teacher)))

    taught = replace(SHORT, teacher="given")
    pruned = run.prune(find("slimming"), small_cnn(10, in_channels=1), data, taught, finetune_epochs=1, train=watched)
    (first, nobody), (second, teacher) = teachers
    assert (first, nobody, second) == (run.TRAINED, None, run.FINETUNED)
    whole = pruned.before.reference.state_dict()
    assert all(torch.equal(value.cpu(), whole[key]) for key, value in teacher.network.state_dict().items())


def test_the_command_takes_a_teacher(tmp_path: Path) -> None:
    words = ["--method", "l1-filters", "--keep-flops", "0.5", "--epochs", "1", "--finetune-epochs", "1", "--quiet"]
    out = tmp_path / "run"
    assert main(["prune", *words, "--teacher", "given", "--device", "cpu", "--out", str(out)]) == 0
    assert '"teacher": "given"' in (out / "run.json").read_text()


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # of PyTorch's compiler, as it is loaded
@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_on_cuda(name: str) -> None:
    config = replace(SHORT, device="cuda")
    pruned = run.prune(find(name), small_cnn(), DIGITS.train.subset(range(256)), config, finetune_epochs=2)
    kept = pruned.result.sizes[0].macs / pruned.result.dense.macs
    assert 0.3 < kept <= 0.4 and len(pruned.result.history) == 3
    x = DIGITS.test.inputs(slice(0, 8)).cpu()
    assert pruned.result.posterior.to("cpu").predict(x).mean.isfinite().all()
