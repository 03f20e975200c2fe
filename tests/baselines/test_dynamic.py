"""Methods that choose channels by image: costs and choices by hand, each image's own cut, and whole runs on digits."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dllp.api import Result, train_dense
from dllp.baselines import DYNAMIC, METHODS, dynamic, find, find_any
from dllp.baselines.dynamic import ByImage, Reads, Setup, cheapest, gated
from dllp.baselines.fbs import BoostingAndSuppression, Saliency
from dllp.baselines.liws import FeatureNorms, InstanceSparsity, set_thresholds, variation
from dllp.baselines.rnp import ACTIONS, Nested, Policy, RuntimePruning, policy_of, recompute_statistics, set_offset
from dllp.config import Config
from dllp.devices import fuse
from dllp.devices.cuda_graph import WARMUP, Capture
from dllp.errors import ConfigError, StructureError
from dllp.structure.groups import discover
from dllp.zoo import small_cnn, small_resnet
from tests.support.oracles import normal
from tests.support.short_runs import DIGITS

SHORT = Config(keep_flops=0.5, epochs=3, batch_size=64, init="fresh", lr=0.1, seed=3)


def two_layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


def lively(model: nn.Module) -> nn.Module:
    """The model with norms as training leaves them: scales of both signs, shifts and statistics."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                assert tensor is not None
                tensor.copy_(0.2 + torch.randn(len(tensor), generator=generator))
            assert module.running_var is not None
            module.running_var.abs_()
    return model


def with_gates(name: str, model: nn.Module, shape: tuple[int, ...] = (1, 8, 8)) -> ByImage:
    model = lively(model)
    return gated(find_any(name), model, discover(model, torch.randn(2, *shape)), seed=0)  # pyright: ignore


def sharpen(found: ByImage) -> None:
    """Let the values of a fresh decision network differ by image."""
    for gate in found.gates:
        assert isinstance(gate, Nested)
        gate.encode.weight.data *= 30  # pyright: ignore
    policy_of(found.network).decode.weight.data *= 30  # pyright: ignore


# ---- costs


def test_the_cost_of_an_image_by_hand() -> None:
    """25 places: 9 taps of 1 -> 4 and 4 -> 6 channels, then 6 -> 3."""
    masks = torch.tensor([[1, 0, 1, 0, 1, 1, 0, 0, 1, 0], [1] * 10]).double()
    x = torch.randn(2, 1, 5, 5)
    dense = 25 * 9 * 4 + 25 * 9 * 24 + 18
    cut, read = 25 * 9 * 2 + 25 * 9 * 6 + 9, 25 * 9 * 4 + 25 * 9 * 12 + 9
    for name, kept, gates in (
        ("fbs", cut, 1 * 4 + 4 * 6),
        ("liws", read, 4 * 25 + 6),
        ("rnp", cut, 1 * 64 + 4 * 64 + 2 * (64 * 128 + 128 * 128 + 128 * 4)),
    ):
        found = with_gates(name, two_layers(), (1, 5, 5))
        found.masks(x)  # gates learn the size of maps
        assert found.costs(masks).tolist() == [kept + gates, dense + gates], name
        counted = {id(p): p.numel() for gate in found.gates for p in gate.parameters()}
        assert found.params == found.structure.params.dense + sum(counted.values())


def test_a_sum_of_layers_and_what_no_plain_layer_reads_stay_whole() -> None:
    found = with_gates("fbs", small_resnet(in_channels=1))
    assert 0 < sum(gate.units for gate in found.gates) < found.structure.units, "the residual stream is not gated"
    grouped = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(StructureError, match="no channels can be chosen by image"):
        with_gates("fbs", grouped)


# ---- the network cut to an image's channels


@pytest.mark.parametrize("build", [small_cnn, small_resnet])
@pytest.mark.parametrize("name", [*DYNAMIC, "rnp:fixed=3"])
def test_each_image_has_the_output_of_its_own_cut_network(name: str, build: Any) -> None:
    found, x = with_gates(name, build(in_channels=1)), normal(16, 1, 8, 8, seed=5)
    x = x * torch.linspace(0.1, 3, 16).view(-1, 1, 1, 1) + normal(16, 1, 1, 1, seed=6)
    found.network.double().eval()
    for gate in found.gates:
        if isinstance(gate, Saliency):
            gate.count.fill_(gate.units // 2)
            with torch.no_grad():
                gate.predict.weight.mul_(20)
        elif isinstance(gate, FeatureNorms):
            gate.threshold = 1.0
    with torch.no_grad():
        if name == "rnp":
            sharpen(found)
        masks, outputs = found.masks(x), found.network(x)
        assert 0.05 < float(masks.mean()) < 0.95
        assert name == "rnp:fixed=3" or len(masks.unique(dim=0)) > 3, "images differ"
        for i in range(16):
            alone = found.cut_for(x[i : i + 1])
            assert not any(isinstance(module, (dynamic.Wrapper, dynamic.Gate)) for module in alone.modules())
            torch.testing.assert_close(alone(x[i : i + 1])[0], outputs[i], rtol=1e-9, atol=1e-10)
            if not found.computes_all:
                own = sum(gate.macs for gate in found.gates)
                assert float(found.costs(masks)[i]) - own == discover(alone, x[:1], channels=False).flops.dense


# ---- FBS


def test_the_most_salient_units_win_and_only_they_learn() -> None:
    gate = Saliency(slice(0, 3), 2, torch.ones(3).double(), torch.Generator().manual_seed(0))
    with torch.no_grad():
        gate.predict.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
        gate.predict.bias.copy_(torch.tensor([0.5, 0.0, 2.0]))
    gate.count.fill_(2)
    x = torch.tensor([[[1.0, -3.0], [0.0, 1.0]], [[-1.0, 0.0], [4.0, 8.0]]]).double()  # s = (2, 0.5) and (0.5, 6)
    gate.choose(x)
    # g = (2.5, 0.5, 0) and (1, 6, 0): pi has the first two; the third is dead
    assert gate.open.tolist() == [[1, 1, 0], [1, 1, 0]]
    torch.testing.assert_close(gate.boost, torch.tensor([[2.5, 0.5, 0.0], [1.0, 6.0, 0.0]]).double())
    assert float(gate.size.detach()) == (2.5 + 0.5 + 1 + 6) / 2
    weights = torch.tensor([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0]]).double()
    gate.count.fill_(1)
    gate.choose(x)  # now unit 0 wins for the first image, unit 1 for the second
    slope, matrix = torch.autograd.grad((gate.boost * weights).sum(), [gate.predict.bias, gate.predict.weight])
    assert slope.tolist() == [1.0, 20.0, 0.0], "no gradient to what loses, however large its factor"
    assert matrix.tolist() == [[2.0, 0.5], [10.0, 120.0], [0.0, 0.0]]
    with torch.no_grad():
        gate.predict.bias.fill_(-100.0)
    gate.count.fill_(2)
    gate.choose(x)
    assert gate.open.sum(1).tolist() == [1, 1] and not bool(gate.boost.any()), "ties at 0 keep one, not two"


def test_boosting_starts_where_the_network_was() -> None:
    """Scales of both signs: saliencies have none, so that signs move into the filters."""
    model, x = lively(two_layers()).double().eval(), normal(5, 1, 5, 5)
    found = gated(BoostingAndSuppression(), model, discover(model, x), seed=0)
    with torch.no_grad():
        for gate in found.gates:
            assert isinstance(gate, Saliency)
            gate.predict.weight.zero_()
        torch.testing.assert_close(found.network.eval()(x), model(x), rtol=1e-12, atol=1e-12)


def test_the_share_that_wins_follows_from_the_budget_and_falls_within_half_of_the_training() -> None:
    found = with_gates("fbs", two_layers(), (1, 5, 5))
    calls: dict[str, Any] = {}

    def train(network: nn.Module, epochs: int, loss: Any, **hooks: Any) -> nn.Module:
        calls.update(hooks, loss=loss)
        return network

    budget = 0.5 * found.structure.flops.dense
    setup = Setup(found, torch.randn(2, 1, 5, 5), None, budget, train)
    counts = [int(gate.count) for gate in BoostingAndSuppression().fit(setup, 10).gates]  # pyright: ignore
    cost = 25 * 9 * counts[0] + 25 * 9 * counts[0] * counts[1] + 3 * counts[1] + 28
    assert found.mean_cost(torch.randn(4, 1, 5, 5)) <= cost <= budget
    larger = 25 * 9 * (counts[0] + 1) * (1 + counts[1] + 1) + 3 * (counts[1] + 1)
    assert larger > budget and counts[0] / 4 == pytest.approx(counts[1] / 6, abs=0.25)
    for progress, opened in ((0.0, [4, 6]), (0.5, counts), (1.0, counts)):
        particles = SimpleNamespace(networks=[found.network])
        calls["step"](SimpleNamespace(particles=particles, progress=progress))
        assert [gate.count for gate in found.gates] == opened  # pyright: ignore
    x, y = torch.randn(4, 1, 5, 5), torch.arange(4) % 3
    plain, heavy = (calls["loss"](found.network.eval(), (x, y))["loss"] for _ in range(2))
    assert torch.equal(plain, heavy)
    sizes = sum(gate.size for gate in found.gates)  # pyright: ignore
    BoostingAndSuppression(strength=0.5).fit(setup, 1)
    found.network.eval()
    calls["step"](SimpleNamespace(particles=SimpleNamespace(networks=[found.network]), progress=1.0))
    logits = calls["loss"](found.network, (x, y))
    torch.testing.assert_close(logits["loss"], F.cross_entropy(logits["logits"], y) + 0.5 * sizes)


# ---- LIWS


def test_the_penalty_on_features_by_hand() -> None:
    gate = FeatureNorms(slice(0, 3), torch.tensor([0, 1, -1, 2]))
    x = torch.zeros(2, 4, 4).double()
    x[0, 0] = torch.tensor([3.0, -4.0, 0.0, 0.0])  # norm 5 over sqrt(4)
    x[0, 1] = torch.tensor([1.0, 1.0, 1.0, 1.0])  # 2 over sqrt(4)
    x[0, 2] = 100.0  # nobody's
    x[1, 3] = torch.tensor([0.0, 0.0, 6.0, 8.0])  # 10 over sqrt(4)
    x.requires_grad_()
    gate.see(x)
    torch.testing.assert_close(gate.norms, torch.tensor([[2.5, 1, 0], [0, 0, 5]]).double(), atol=1e-11, rtol=0)
    assert gate.macs == 12 and bool((gate.open == 1).all())
    penalty = InstanceSparsity(strength=0.1).penalty(nn.Sequential(gate))
    torch.testing.assert_close(penalty, torch.tensor(0.1 * (3.5 + 5) / 2, dtype=torch.float64), atol=1e-11, rtol=0)
    (slope,) = torch.autograd.grad(penalty, x)
    wanted = torch.zeros_like(slope)  # strength / images * F / (|F| sqrt(places)); none for maps of zeros
    wanted[0, 0, :2], wanted[0, 1] = 0.1 / 2 / 2 * torch.tensor([0.6, -0.8]).double(), 0.1 / 2 / 2 * 0.5
    wanted[1, 3, 2:] = 0.1 / 2 / 2 * torch.tensor([0.6, 0.8]).double()
    torch.testing.assert_close(slope, wanted, atol=1e-9, rtol=1e-9)
    gate.threshold = 1.0  # of the means 3.5 / 3 and 5 / 3
    gate.see(x)
    assert gate.open.tolist() == [[1, 0, 0], [0, 0, 1]]
    gate.threshold = 100.0
    gate.see(x)
    assert gate.open.tolist() == [[1, 0, 0], [0, 0, 1]], "the largest one stays"
    norms = torch.tensor([[2.5, 1, 0], [0, 0, 5]]).double()
    expected = (norms.std(1, correction=0) / norms.mean(1)).mean()
    assert variation(gate) == pytest.approx(float(expected))


def test_thresholds_meet_the_mean_budget_and_spare_layers_of_small_variation() -> None:
    found, x = with_gates("liws", small_cnn()), torch.randn(64, 1, 8, 8)
    found.masks(x[:1])
    dense = found.structure.flops.dense + sum(gate.macs for gate in found.gates)
    for keep, layers in ((0.85, 2), (0.2, 3)):
        budget = keep * dense
        set_thresholds(found, x, budget)
        limits = [gate.threshold for gate in found.gates]  # pyright: ignore
        assert sum(limit > 0 for limit in limits) == layers and len({limit for limit in limits if limit}) == 1
        costs = found.costs(found.masks(x))
        assert float(costs.mean()) <= budget and len(costs.unique()) > 3
        for gate in found.gates:
            gate.threshold *= 1 - 1e-5  # pyright: ignore
        assert found.mean_cost(x) > budget, "with a threshold just below it is not met"
    for gate in found.gates:
        gate.threshold = 0.0  # pyright: ignore
    found.masks(x)
    set_thresholds(found, x, 0.85 * dense)
    (spared,) = [gate for gate in found.gates if not gate.threshold]  # pyright: ignore
    assert all(variation(spared) <= variation(gate) for gate in found.gates)  # pyright: ignore


# ---- RNP


def test_rewards_and_targets_of_two_layers_by_hand() -> None:
    policy = Policy(0, price=0.2)
    policy.values = [torch.tensor([[0.1, 0.4, 0.2, 0.0], [0.0, 0.0, 0.0, 3.0]]).requires_grad_(),
                     torch.tensor([[-0.5, -0.7, -0.9, -1.0], [0.3, 0.1, 0.6, 0.2]]).requires_grad_()]  # fmt: skip
    policy.actions = [torch.tensor([1, 3]), torch.tensor([0, 2])]
    policy.mean_loss.fill_(0.5)
    losses = torch.tensor([0.25, 1.0])
    first, last = policy.targets(losses)
    # -0.2 a + max of the next layer's values; then -0.2 a - loss / 0.5
    torch.testing.assert_close(first, torch.tensor([-0.2 - 0.5, -0.6 + 0.6]))
    torch.testing.assert_close(last, torch.tensor([-0.5, -0.4 - 2.0]))
    # of the actions taken: 0.4 - -0.7 = 1.1, 3 - 0 = 3, -0.5 - -0.5 = 0, 0.6 - -2.4 = 3
    loss = policy.loss(losses)
    torch.testing.assert_close(loss, torch.tensor((1.1 - 0.5 + 3 - 0.5 + 0 + 3 - 0.5) / 4))
    one, two = torch.autograd.grad(loss, policy.values)
    assert (one * 4).tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]] and (two * 4).tolist() == [[0, 0, 0, 0], [0, 0, 1, 0]]
    policy.raise_price(0.3, rate=0.1)
    assert float(policy.price) == pytest.approx(0.23), "too costly: a group's price rises"
    policy.raise_price(-0.1, rate=0.1)
    assert float(policy.price) == pytest.approx(0.22)
    policy.raise_price(-9.0, rate=0.1)
    assert float(policy.price) == 0.0


def test_groups_nest_and_the_first_has_the_largest_filters() -> None:
    policy = Policy(0, 0.1).eval()
    sizes = torch.tensor([0.1, 5.0, 3.0, 0.2, 4.0, 1.0, 0.3, 2.0])
    gate = Nested(slice(0, 8), sizes, 3, policy, first=True)
    opened = []
    for action in range(ACTIONS):
        policy.decode.bias.data = F.one_hot(torch.tensor(action), ACTIONS).float() * 1e3  # pyright: ignore
        gate.choose(torch.randn(5, 3, 4))
        assert bool((gate.open == gate.open[0]).all()) and len(policy.actions) == 1
        opened.append(gate.open[0])
    assert opened[0].nonzero().flatten().tolist() == [1, 4] and gate.least == 2
    assert opened[1].nonzero().flatten().tolist() == [1, 2, 4, 7] and bool(opened[3].all())
    assert all(bool((a <= b).all()) for a, b in pairwise(opened))
    policy.offset = 1e4
    gate.choose(torch.randn(5, 3, 4))
    assert gate.open.sum(1).tolist() == [2] * 5, "whatever the values, groups are too dear"
    policy.train().explore.fill_(1.0)
    gate.choose(torch.randn(400, 3, 4))
    shares = policy.actions[0].bincount(minlength=ACTIONS) / 400
    assert bool(((shares - 0.25).abs() < 0.08).all())


def test_values_learn_which_image_needs_its_groups() -> None:
    """Images of one kind lose 2 below four groups, others nothing: at a price of 0.1 the first compute all of them."""
    policy, encode = Policy(0, price=0.1), nn.Linear(2, 64)
    policy.mean_loss.fill_(1.0)
    kinds = (torch.arange(64) % 2).float()

    def episode() -> list[Tensor]:
        """Two layers; the input of the second shows what the first has computed."""
        policy.begin()
        first = policy.act(encode(torch.stack([kinds, torch.zeros(64)], 1)))
        return [first, policy.act(encode(torch.stack([kinds, 1.0 + first], 1)))]

    optimiser = torch.optim.Adam([*policy.parameters(), *encode.parameters()], lr=0.01)
    for _ in range(300):
        short = torch.stack(episode()).amin(0) < ACTIONS - 1
        optimiser.zero_grad()
        policy.loss(2.0 * kinds * short).backward()
        optimiser.step()
    policy.eval()
    for actions in episode():
        assert actions.tolist() == [3 * int(kind) for kind in kinds]


def test_an_offset_meets_the_budget_and_statistics_follow_the_policy() -> None:
    found, x = with_gates("rnp", small_cnn()), torch.randn(64, 1, 8, 8)
    sharpen(found)
    budget = 0.4 * found.structure.flops.dense
    set_offset(found, x, budget)
    assert 0.2 * found.structure.flops.dense < found.mean_cost(x) <= budget
    momenta = [m.momentum for m in found.network.modules() if isinstance(m, nn.BatchNorm2d)]
    batches = SimpleNamespace(epoch=lambda number: iter([(x[:32], None), (x[32:], None)]))
    recompute_statistics(found.network, batches)
    first = found.network.get_submodule("bn1")
    assert isinstance(first, nn.BatchNorm2d) and first.running_mean is not None and not first.training
    conv = dynamic.unwrapped(found.network.get_submodule("conv1"))
    torch.testing.assert_close(first.running_mean, conv(x).mean((0, 2, 3)).detach(), rtol=1e-4, atol=1e-5)
    assert [m.momentum for m in found.network.modules() if isinstance(m, nn.BatchNorm2d)] == momenta


def test_bisection_finds_the_least_value_within_a_budget() -> None:
    assert cheapest(lambda v: 10 - v, 7.0, 0.0, 10.0) == pytest.approx(3, abs=1e-5)
    assert 10 - cheapest(lambda v: 10 - v, 7.0, 0.0, 10.0) <= 7


# ---- captured steps


class Began(Exception):
    """The training that a fit asks for."""


@pytest.mark.parametrize("name", [*DYNAMIC, "rnp:fixed=2"])
def test_a_step_reads_nothing_back_and_stays_on_its_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values, every value read and every tensor of the CPU among them is an error."""
    found, x = with_gates(name, small_resnet(in_channels=1)), torch.randn(4, 1, 8, 8)
    given: list[Any] = []

    def train(*words: Any, **hooks: Any) -> nn.Module:
        given[:] = words
        raise Began

    found.masks(x)
    with pytest.raises(Began):
        find_any(name).fit(Setup(found, x, None, 0.8 * found.structure.flops.dense, train), 3)  # pyright: ignore
    network, _, loss = given
    assert fuse.rewrite(network.train()) is None, "a fused norm would leave its wrapper"
    monkeypatch.setattr(torch, "autocast", lambda *words, **options: nullcontext())  # which knows no such device
    y = torch.zeros(4, dtype=torch.long, device="meta")
    value = loss(network.to("meta"), (x.to("meta"), y))["loss"]
    learning = [p for p in network.parameters() if p.requires_grad]
    assert {g.device.type for g in torch.autograd.grad(value, learning)} == {"meta"}


@pytest.mark.cuda
def test_a_replayed_step_sees_what_changed_between_steps() -> None:
    device = torch.device("cuda")
    salient = Saliency(slice(0, 6), 3, torch.ones(6), torch.Generator().manual_seed(0)).to(device)
    policy = Policy(2, 0.1).to(device).train()
    opened, random = torch.zeros(2, device=device)
    x = torch.rand(512, 3, 4, device=device)

    def step(x: Tensor, y: Tensor) -> None:
        salient.choose(x)
        opened.copy_(salient.open.sum(1).mean())
        policy.begin()
        random.copy_((policy.act(x.mean(2)) != 1).float().mean())

    capture = Capture(step, torch.Generator(device), enabled=True)
    for count, explore in [(6, 1.0)] * (WARMUP + 1) + [(2, 0.0), (4, 0.5)]:
        salient.count.fill_(count)
        policy.explore.fill_(explore)
        with torch.no_grad():
            capture(x, x, key="open")
        assert float(opened) == count and float(random) == pytest.approx(0.75 * explore, abs=0.1)
    assert capture.state == "graph"


# ---- whole runs


@cache
def dense() -> Result:
    return train_dense(small_cnn(), DIGITS, SHORT)


def whole_run(name: str, epochs: int = 4) -> tuple[ByImage, list[Result]]:
    return dynamic.prune(find_any(name), dense().model, DIGITS, SHORT, epochs=epochs)  # pyright: ignore


@pytest.mark.parametrize(("name", "least"), [("fbs", 0.9), ("liws:after=1", 0.6), ("rnp", 0.85)])
def test_a_whole_run_on_digits(name: str, least: float) -> None:
    before = copy.deepcopy(dense().model.state_dict())
    found, trainings = whole_run(name)
    assert all(torch.equal(value, before[key]) for key, value in dense().model.state_dict().items())
    assert sum(len(result.history) for result in trainings) == 4
    x, y = DIGITS.test.inputs(slice(0, 360)), DIGITS.test.y[:360]
    costs = found.costs(found.masks(x)) / found.structure.flops.dense
    assert 0.35 < float(costs.mean()) < 0.55, "met on training images, near it on others"
    assert len(costs.unique()) == 1 if name == "fbs" else len(costs.unique()) > 10
    with torch.no_grad():
        assert float((found.network(x).argmax(1) == y).float().mean()) > least
        found.network.double()
        few = x[:16].double()
        outputs = found.network(few)
        for i in range(16):
            torch.testing.assert_close(
                found.cut_for(few[i : i + 1])(few[i : i + 1])[0], outputs[i], rtol=1e-9, atol=1e-10
            )


@pytest.mark.parametrize("name", DYNAMIC)
def test_runs_repeat_and_never_look_at_test_images(name: str) -> None:
    train, test = DIGITS.train.subset(range(192)), DIGITS.test
    others = replace(test, x=255 - test.x, y=test.y.flip(0))
    first, again = (
        dynamic.prune(find_any(name), dense().model, replace(DIGITS, train=train, test=seen), SHORT, epochs=2)[0]  # pyright: ignore
        for seen in (test, others)
    )
    x = test.inputs(slice(0, 64))
    assert torch.equal(first.masks(x), again.masks(x)) and torch.equal(first.network(x), again.network(x))


def test_all_epochs_may_have_random_actions() -> None:
    found, _ = whole_run("rnp:random=1", epochs=1)
    assert float(policy_of(found.network).explore) == 1.0


def test_what_cannot_be() -> None:
    assert not DYNAMIC.keys() & METHODS.keys()
    for name, method in DYNAMIC.items():
        with pytest.raises(ConfigError, match=f"{name} chooses channels for each image.*dllp bench table2"):
            find(f"{name}")
        assert method.title and 2010 < method.year < 2024 and len(method.published) == 1
    own = {name: bool(method.published[0].rerun) for name, method in DYNAMIC.items()}
    assert own == {"rnp": True, "fbs": True, "liws": False}
    data = DIGITS.train.subset(range(64))
    with pytest.raises(StructureError, match=r"keep_flops = 0.05: rnp computes 0\.\d+ for every image, give more"):
        dynamic.prune(RuntimePruning(), small_cnn(), data, Config(keep_flops=0.05), epochs=10**6)
    with pytest.raises(ConfigError, match="fbs needs a budget: give keep_flops"):
        dynamic.prune(BoostingAndSuppression(), small_cnn(), data, Config(keep_params=0.5), epochs=10**6)
    with pytest.raises(ConfigError, match="fixed = 5: give 1 to 4 groups"):
        find_any("rnp:fixed=5")
    for text in ("fbs:strength=-1", "liws:after=-1", "rnp:random=2"):
        with pytest.raises(ConfigError, match="a number from 0 to"):
            find_any(text)


def test_a_reader_of_tokens_and_of_several_groups() -> None:
    gate = dynamic.Gate(slice(0, 2))
    gate.open = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    layer, x = nn.Linear(3, 2), torch.randn(2, 5, 3)
    found = Reads(layer, gate, torch.tensor([1, -1, 0]), 1.0, first=True)(x)
    masks: Tensor = torch.tensor([[0.0, 1, 1], [1, 1, 0]])
    torch.testing.assert_close(found, layer(x * masks[:, None]))
