"""DCP: heads and their places, the greedy choice by gradients, what it rebuilds, and the run around it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dllp.api import Result
from dllp.baselines import discrimination, find, run
from dllp.baselines.discrimination import DiscriminationAware, Heads, Selection, arriving
from dllp.baselines.protocol import Scene
from dllp.config import Config
from dllp.errors import ConfigError
from dllp.structure.slicing import copied
from dllp.zoo import resnet20, small_cnn, small_resnet
from tests.support.oracles import normal
from tests.support.short_runs import DIGITS, scene_of

QUICK = DiscriminationAware(rounds=4, images=256)


@cache
def prepared() -> Scene:
    """A residual network whose norms have seen data, heads at two places, pairs."""
    torch.manual_seed(0)
    model, x, y = small_resnet().double(), normal(40, 3, 8, 8), torch.arange(40) % 10
    with torch.no_grad():
        model.train()(x)
    scene = replace(scene_of(model, x), examples=lambda count: iter([(x[:24], y[:24]), (x[24:count], y[24:count])]))
    heads = Heads(scene.network, ["blocks.1.conv1", "blocks.2.conv1"], x[:2]).double()
    with torch.no_grad():
        heads.train()(x)
    return replace(scene, around=heads.eval())


def selection(scene: Scene, group: int, strength: float = 1.0) -> Selection:
    heads = copied(scene.around).eval().requires_grad_(False)  # type: ignore[arg-type]
    network = copied(scene.network).eval().requires_grad_(False)
    readers = discrimination.consumers(scene, scene.structure.groups[group])
    place = discrimination.next_place(scene, heads.places, readers)  # type: ignore[arg-type]
    units, pairs = scene.structure.groups[group].units, list(scene.examples(40))
    return Selection(network, heads, place, strength, readers, units, pairs)  # type: ignore[arg-type]


def test_heads_stand_at_equal_flops_where_nothing_is_cut() -> None:
    model = resnet20()
    scene = scene_of(model, torch.zeros(2, 3, 32, 32))
    places = discrimination.head_places(scene, 3)
    macs = {layer.name: layer.macs for layer in scene.structure.layers}
    names, total = list(macs), sum(macs.values())
    before = [sum(macs[name] for name in names[: names.index(place)]) / total for place in places]
    assert before == pytest.approx([0.25, 0.5, 0.75], abs=0.06)
    assert all(place.endswith("conv1") for place in places), "blocks begin there: the stream is never cut"
    judges = [
        discrimination.next_place(scene, places, discrimination.consumers(scene, group))
        for group in scene.structure.groups
    ]
    assert judges == sorted(judges, key=lambda place: [*places, None].index(place))
    assert set(judges) == {*places, None}, "the last layers have the network's own classifier"


def test_a_head_is_linear_on_pooled_features_and_slows_its_gradient() -> None:
    scene = prepared()
    heads = copied(scene.around)  # type: ignore[arg-type]
    x, y = next(scene.examples(40))
    answers = heads(x).split(10, dim=1)
    torch.testing.assert_close(answers[0], scene.network.eval()(x))
    arrived = heads.network.blocks[0](heads.network.relu(heads.network.bn(heads.network.conv(x))))  # type: ignore
    norm, linear = heads.norms[0], heads.linears[0]  # type: ignore[index]
    pooled = F.batch_norm(arrived, norm.running_mean, norm.running_var, norm.weight, norm.bias).relu().mean((2, 3))
    torch.testing.assert_close(answers[1], linear(pooled))
    found = discrimination.total_loss(10, heads, (x, y))
    losses = [F.cross_entropy(answer, y) for answer in answers]
    torch.testing.assert_close(found["loss"], losses[0] + losses[1] + losses[2])
    weight = heads.network.conv.weight  # type: ignore[union-attr]
    through = torch.autograd.grad(F.cross_entropy(linear(pooled), y), weight, retain_graph=True)[0]  # type: ignore
    slowed = torch.autograd.grad(losses[1], weight)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(slowed, heads.weights[0] * through)  # type: ignore[operator, index]


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_the_first_choice_has_the_largest_gradient_without_any_channel(strength: float) -> None:
    """By hand: the block's output when its second layer reads nothing, and the head behind the block."""
    scene = prepared()
    chosen = selection(scene, 1, strength)
    (name,) = chosen.readers
    block = scene.network.eval().get_submodule(name.rpartition(".")[0])
    assert chosen.place is not None and name.endswith("conv2")
    empty = torch.zeros_like(chosen.weights[0], requires_grad=True)
    total = torch.zeros(())
    for x, y in scene.examples(40):
        stream = arriving(scene.network, name.replace("conv2", "conv1"), [], x)[0]
        inner = block.relu1(block.bn1(block.conv1(stream)))  # type: ignore[operator]
        output, wanted = (F.conv2d(inner, weight, padding=1) for weight in (empty, block.conv2.weight))  # type: ignore
        arrived = block.relu2(block.bn2(output) + block.shortcut(stream))  # type: ignore[operator]
        loss = F.cross_entropy(chosen.heads.classify(chosen.place, arrived), y)
        total = total + len(x) * ((output - wanted).square().mean() / 2 + strength * loss)
    gradient = torch.autograd.grad(total / 40, empty)[0]
    sizes = gradient.flatten(2).norm(dim=2).sum(0)
    values = chosen.grow(1, 1)
    assert int(values.argmax()) == int(sizes.argmax())
    rest = sizes.argsort(descending=True)[1:]
    assert values[rest].diff().max() <= 0, "the others follow by their gradient"


def test_sets_are_nested_and_the_rebuilt_output_comes_nearer() -> None:
    scene, missed, sets = prepared(), [], []
    for count in (2, 4, 8):
        chosen = selection(scene, 1)
        values = chosen.grow(count, 8)  # one unit in each round
        sets.append(set(values.argsort(descending=True)[:count].tolist()))
        with torch.no_grad():
            x = scene.inputs
            (name,) = chosen.readers
            outputs = [arriving(net, None, [name], x)[1][name] for net in (chosen.network, scene.network.eval())]
        missed.append(float((outputs[0] - outputs[1]).square().mean()))
        weight = chosen.network.get_submodule(name).weight
        assert {i for i in range(16) if bool(weight[:, i].any())} == sets[-1], "0 for what is not chosen"
    assert sets[0] < sets[1] < sets[2] and missed[0] > missed[1] > missed[2]


def test_fitting_lowers_the_loss_of_the_chosen() -> None:
    chosen = selection(prepared(), 1)
    values = chosen.grow(6, 1)
    before = float(chosen.loss(0).detach())
    for weight in chosen.weights:
        weight.requires_grad_()
    for _ in range(30):
        chosen.fit(values > 1)
    assert float(chosen.loss(0).detach()) < before
    assert all(not bool(w[:, (values <= 1).nonzero().flatten()].any()) for w in chosen.weights)


def test_a_run_trains_heads_within_the_fine_tuning() -> None:
    stages: list[tuple[str, int]] = []

    def train(verb: run.Verb, stage: str, model: nn.Module, data: object, config: Config) -> Result:
        stages.append((stage, config.epochs))
        return verb(model, data, config)

    config = Config(keep_flops=0.4, epochs=4, batch_size=64, init="fresh", device="cpu")
    pruned = run.prune(QUICK, small_cnn(), DIGITS, config, finetune_epochs=3, train=train)
    assert stages == [(run.TRAINED, 4), (run.PREPARED, 1), (run.FINETUNED, 2)]
    assert [record["epoch"] for record in pruned.result.history] == list(range(1, 8))
    test = DIGITS.test
    hits = [
        (r.model.eval()(test.inputs(slice(None))).argmax(1) == test.y).float().mean()
        for r in (pruned.before, pruned.result)
    ]
    assert hits[0] > 0.3 and hits[1] > 0.9, "rebuilt, then fine-tuned"
    with pytest.raises(ConfigError, match="finetune_epochs = 1: method dcp trains for a part of them"):
        run.prune(find("dcp"), small_cnn(), DIGITS, config, finetune_epochs=1)
