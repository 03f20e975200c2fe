"""AMC: bounded actions, what an episode is paid, the agent's targets, and that it finds more than random episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
import torch
from torch import Tensor, nn

from dllp.baselines import automl, find, run
from dllp.baselines.automl import Agent, Network, Walk, search
from dllp.baselines.protocol import Scene
from dllp.config import Config
from dllp.structure.slicing import cut, recipe
from dllp.zoo import small_cnn, small_resnet
from tests.support.oracles import normal
from tests.support.short_runs import DIGITS, scene_of

CLASSES, COPIES = 16, 3


def relay() -> nn.Module:
    """A network that passes on one-hot inputs: three units of each class in every layer, one in the seventh."""
    sizes = [CLASSES, *[COPIES * CLASSES] * 6, CLASSES, *[COPIES * CLASSES] * 6, CLASSES]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layer = nn.Linear(inputs, outputs)
        units = torch.arange(inputs)
        with torch.no_grad():
            same = torch.arange(outputs)[:, None] % CLASSES == units % CLASSES
            layer.weight.copy_(same * torch.where(units < CLASSES, 1.0, 0.5))  # one of each class comes first
            layer.bias.zero_()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def labelled(model: nn.Module, x: Tensor, y: Tensor, **changes: object) -> Scene:
    return replace(scene_of(model, x, **changes), examples=lambda count: iter([(x[:count], y[:count])]))


def bottleneck(seed: int) -> Scene:
    """A third of every layer suffices, but of one, which must not be cut at all."""
    y = torch.arange(2 * CLASSES) % CLASSES
    x = torch.eye(CLASSES)[y] + 0.02 * normal(2 * CLASSES, CLASSES).float()
    return labelled(relay(), x, y, keep_flops=0.3, seed=seed)


def passed_on(counts: Sequence[int]) -> float:
    """The reward of `bottleneck`: the classes that its narrowest layer passes on."""
    return min(min(counts) / CLASSES, 1.0) - 1


def test_the_narrowest_layer_decides_what_is_paid() -> None:
    scene = bottleneck(0)
    walk, network = Walk(scene), Network(scene, automl.magnitudes(scene), 2 * CLASSES)
    assert network([CLASSES] * 13) == 0 and network([CLASSES] * 6 + [8] + [CLASSES] * 6) == -0.5
    for _ in range(5):
        walk.episode(lambda state: float(torch.rand(())))
        assert network(walk.counts) == passed_on(walk.counts)
    assert search(walk, network, 3, 1) == search(walk, network, 3, 1), "the same for the same seed"


@pytest.mark.parametrize("seed", [3, pytest.param(7, marks=pytest.mark.slow), pytest.param(11, marks=pytest.mark.slow)])
def test_late_episodes_are_paid_more_than_random_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds are those of 3 to 12 whose agents learned least."""
    paid: list[float] = []
    remember = Agent.remember

    def watched(self: Agent, states: Tensor, actions: Tensor, reward: float) -> None:
        paid.append(reward)
        remember(self, states, actions, reward)

    monkeypatch.setattr(Agent, "remember", watched)
    search(Walk(bottleneck(seed)), passed_on, 200, 50)
    assert fmean(paid[-50:]) > fmean(paid[:50]) + 0.05


@pytest.mark.slow
def test_agents_find_more_than_equally_many_random_episodes_on_average() -> None:
    """One agent may not: of seeds 3 to 12 seven found more, two as much, one less (results/tuning)."""
    found = [
        [search(Walk(bottleneck(seed)), passed_on, 200, warmup)[1] for warmup in (50, 200)] for seed in range(3, 8)
    ]
    learned, random = zip(*found, strict=True)
    assert fmean(learned) > fmean(random) + 0.05


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.9])
def test_every_episode_meets_the_budget(keep: float) -> None:
    scene = scene_of(small_resnet(), torch.zeros(2, 3, 8, 8), keep_flops=keep)
    walk = Walk(scene)
    greedy, shy = (walk.episode(lambda state, share=share: share)[1] for share in (1.0, 0.0))
    assert (
        bool((shy <= greedy).all())
        and [round(float(a) * n) for a, n in zip(shy, walk.units, strict=True)] == walk.least
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        states, actions = walk.episode(lambda state: float(torch.rand((), generator=generator)))
        assert float(scene.cost(scene.first(walk.counts))) <= keep and states.shape == (walk.steps, 11)
        assert bool((states >= 0).all()) and bool((states <= 1).all())
        torch.testing.assert_close(states[1:, 10], actions[:-1])  # the last action
    walk.episode(lambda state: 1.0)
    one_more = list(walk.counts)
    one_more[0] += 1
    bound = float(scene.cost(scene.first([*one_more[:1], *walk.least[1:]])))
    assert walk.counts[0] == walk.units[0] or bound > keep, "lowered by no more than the budget needs"


def test_an_episode_is_paid_with_the_accuracy_of_the_cut_and_rebuilt_network() -> None:
    torch.manual_seed(0)
    x, y = normal(64, 1, 8, 8).float(), torch.arange(64) % 10
    model = small_cnn()
    with torch.no_grad():
        for _ in range(20):
            model.train()(x)
    scene = labelled(model, x, y)
    order = automl.magnitudes(scene)
    expected = dict(model.named_parameters())["conv2.weight"].detach().abs().sum((0, 2, 3)).double()
    torch.testing.assert_close(order[scene.structure.slices[0]], expected)
    counts = [20, 30, 40]
    keep = scene.largest(order, counts)
    assert [int(keep[here].sum()) for here in scene.structure.slices] == counts
    small_recipe = recipe(model, scene.structure.groups, keep)
    small = cut(model, small_recipe)
    find("amc").repair(small, small_recipe, scene)  # fits the sliced layers by themselves
    with torch.no_grad():
        hits = (small.eval()(x).argmax(1) == y).double().mean()
    assert Network(scene, order, 64)(counts) == pytest.approx(float(hits) - 1)


def test_targets_end_with_the_episode() -> None:
    torch.manual_seed(0)
    agent = Agent(2, 3)
    states = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    agent.remember(states, torch.tensor([0.7, 0.8, 0.9]), -0.25)
    state, action, paid, after, done = agent.memory.split(agent.parts, dim=1)
    assert torch.equal(state, states) and torch.equal(after, states[[1, 2, 2]])
    assert action.flatten().tolist() == pytest.approx([0.7, 0.8, 0.9]) and paid.flatten().tolist() == [-0.25] * 3
    assert done.flatten().tolist() == [0, 0, 1]
    agent.baseline = -0.5
    actor, critic = agent.targets
    following = critic(states[[1, 2]], actor(states[[1, 2]])).detach()
    wanted = torch.cat([0.25 + following, torch.tensor([[0.25]])])
    torch.testing.assert_close(agent.wanted(paid, after, done), wanted)
    agent.remember(states[:1], torch.tensor([0.5]), 0.0)
    assert len(agent.memory) == 3 and float(agent.memory[-1, 2]) == 0.5, "the oldest is forgotten"


def test_noise_is_a_normal_truncated_to_shares() -> None:
    from scipy.stats import kstest, truncnorm

    torch.manual_seed(0)
    agent, state = Agent(2, 1), torch.tensor([0.3, 0.9])
    mean = float(agent.actor(state[None]).detach())
    found = [agent.act(state, 0.5) for _ in range(2000)]
    assert kstest(found, truncnorm(-mean / 0.5, (1 - mean) / 0.5, mean, 0.5).cdf).pvalue > 0.01
    assert agent.act(state, 1e-9) == pytest.approx(mean, abs=1e-6)


def test_a_whole_run_on_digits_sees_no_test_image(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    own = Network.__init__

    def watched(self: Network, scene: Scene, order: Tensor, images: int) -> None:
        own(self, scene, order, images)
        seen.extend([scene.inputs, *(x for x, _ in self.pairs)])

    monkeypatch.setattr(Network, "__init__", watched)
    config = Config(keep_flops=0.4, epochs=4, batch_size=64, init="fresh", device="cpu")
    pruned = run.prune(find("amc:episodes=16,warmup=8,images=300"), small_cnn(), DIGITS, config, finetune_epochs=2)
    assert pruned.result.sizes[0].macs <= 0.4 * pruned.result.dense.macs
    test = DIGITS.test
    hits = [
        (r.model.eval()(test.inputs(slice(None))).argmax(1) == test.y).float().mean()
        for r in (pruned.before, pruned.result)
    ]
    assert hits[0] > 0.5 and hits[1] > 0.9
    known = {image.numpy().tobytes() for image in DIGITS.train.inputs(slice(None))}
    assert all(image.contiguous().numpy().tobytes() in known for part in seen for image in part)
