"""The method in a loop of the user's own: the same steps as plain PyTorch's, and as those of `dllp.prune`."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dllp
from dllp import ArtifactError, Config, ConfigError, DllpError, StructureError
from tests.support.commands import ENVIRONMENT

X, Y = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
STEPS = 12


class Net(nn.Module):
    """A small network with a method of its own, whose forward takes keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 7, 3, padding=1, bias=False), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 5, 3), nn.ReLU()
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.body(x).mean((2, 3))) * scale

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)


def model(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def config(**changes: Any) -> Config:
    base: dict[str, Any] = dict(keep_flops=0.5, epochs=3, lr=0.05, warmup=0, device="cpu", seed=3)
    return Config(**(base | changes))


def batches(count: int = STEPS, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    for k in range(count):
        part = [(k * size + j) % len(X) for j in range(size)]
        yield X[part], Y[part]


def pruner(changes: dict[str, Any] | None = None, **options: Any) -> dllp.Pruner:
    given: dict[str, Any] = {"num_data": len(X), "steps": STEPS} | options
    return dllp.Pruner(model(), X[:2], config(**(changes or {})), **given)


def run(pruner: dllp.Pruner, count: int = STEPS) -> None:
    for x, y in batches(count):
        for network in pruner.networks:
            F.cross_entropy(network(x), y).backward()
        pruner.step()


def equal(network: nn.Module, other: nn.Module) -> bool:
    held = (each.state_dict().values() for each in (network, other))
    return all(torch.equal(a, b) for a, b in zip(*held, strict=True))


# ---- the plain loop


PLAIN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01),
}


@pytest.mark.parametrize("name", PLAIN)
def test_without_gates_it_is_the_plain_loop_bit_for_bit(name: str) -> None:
    """With a scheduler, accumulated and clipped gradients, and the optimiser's own rounding."""
    lr = 0.05 if name == "sgd" else 0.01
    changes = {"optimizer": name, "particles": 1, "beta": 0.0, "weight_decay": 0.01, "lr": lr}
    ours, plain = pruner(changes, gates=False), model().train()
    optimizer = PLAIN[name](plain.parameters())
    pairs = [(ours, ours.networks[0]), (optimizer, plain)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each, _ in pairs]
    for x, y in batches():
        for (each, network), schedule in zip(pairs, schedules, strict=True):
            for part in (slice(0, 5), slice(5, 8)):
                (F.cross_entropy(network(x[part]), y[part]) / 2).backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            each.step()
            each.zero_grad()
            schedule.step()
    assert equal(ours.networks[0], plain)
    assert equal(ours.finish().model, plain.eval())


def test_parameters_of_a_group_have_their_own_decay_and_rate() -> None:
    """No decay for norms and biases, to the last bit; half the rate for the body, to rounding."""
    ours, plain = (
        pruner({"optimizer": "adamw", "particles": 1, "beta": 0.0, "weight_decay": 0.3, "lr": 0.01}, gates=False,
               groups=lambda name, p: {} if p.ndim > 1 else {"weight_decay": 0}),
        model().train(),
    )  # fmt: skip
    split = [[p for p in plain.parameters() if (p.ndim > 1) == many] for many in (True, False)]
    groups = [{"params": split[0], "weight_decay": 0.3}, {"params": split[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    torch.optim.lr_scheduler.ConstantLR(ours, 1.0)
    for x, y in batches():
        for each, network in ((ours, ours.networks[0]), (optimizer, plain)):
            F.cross_entropy(network(x), y).backward()
            each.step()
            each.zero_grad()
    assert equal(ours.networks[0], plain)


@pytest.mark.parametrize("name", PLAIN)
def test_layers_have_their_own_rates(name: str) -> None:
    changes = {"optimizer": name, "particles": 1, "beta": 0.0, "weight_decay": 0.01, "lr": 0.01}
    ours, plain = pruner(changes, gates=False, groups=lambda n, _: {"lr": 0.5 if "body" in n else 1.0}), model().train()
    torch.optim.lr_scheduler.ConstantLR(ours, 1.0)
    groups = [{"params": plain.body.parameters(), "lr": 0.005}, {"params": plain.head.parameters(), "lr": 0.01}]
    optimizer = PLAIN[name](groups)
    for x, y in batches():
        for each, network in ((ours, ours.networks[0]), (optimizer, plain)):
            F.cross_entropy(network(x), y).backward()
            each.step()
            each.zero_grad()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.networks[0].state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_an_optimiser_of_the_users_own() -> None:
    """Without gates the same as alone; with gates it trains the small networks to the end."""
    plain = model().train()
    ours = pruner({"particles": 1, "beta": 0.0}, gates=False, optimizer=PLAIN["adamw"])
    optimizer = PLAIN["adamw"](plain.parameters())
    for x, y in batches():
        for each, network in ((ours, ours.networks[0]), (optimizer, plain)):
            F.cross_entropy(network(x), y).backward()
            each.step()
            optimizer.zero_grad()
    assert equal(ours.networks[0], plain)
    gated = pruner({"particles": 2}, optimizer=PLAIN["adamw"])
    run(gated)
    result = gated.finish()
    assert result.sizes[0].macs <= 0.5 * result.dense.macs
    assert not equal(result.particles[0].network, result.particles[1].network)


@pytest.mark.parametrize("built_on", ["pruner", "inner"])
def test_a_scheduler_moves_an_optimiser_of_the_users_own(built_on: str) -> None:
    """Built on the pruner or on `inner`, and groups of parameters keep their ratio."""

    def groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.01}], lr=0.1)

    plain = model().train()
    ours, optimizer = pruner({"particles": 1}, gates=False, optimizer=groups), groups(list(plain.parameters()))
    assert ours.param_groups[0]["lr"] == 0.1
    built = ours if built_on == "pruner" else ours.inner
    assert built is not None
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (built, optimizer)]
    for x, y in batches(3):
        for each, network in ((ours, ours.networks[0]), (optimizer, plain)):
            F.cross_entropy(network(x), y).backward()
            each.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    assert equal(ours.networks[0], plain)


def test_records_have_the_rate_of_the_last_step() -> None:
    """Of a scheduler, or of another optimiser."""
    scheduled, other = pruner(), pruner(optimizer=lambda p: torch.optim.SGD(p, lr=0.123))
    schedule = torch.optim.lr_scheduler.StepLR(scheduled, 1, 0.5)
    for _ in range(2):
        run(scheduled, 1)
        run(other, 1)
        schedule.step()
    assert scheduled.end_epoch().lr == 0.025
    assert other.end_epoch().lr == 0.123


def test_a_gradient_scaler_of_pytorch() -> None:
    """Scaled by a power of two all is as it was; a step that overflows is none."""
    plain, scaled = pruner(), pruner()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    run(plain)
    for k, (x, y) in enumerate(batches()):
        for broken in (True, False) if k in (3, STEPS - 2) else (False,):
            for network in scaled.networks:
                loss = F.cross_entropy(network(x), y)
                scaler.scale(loss * torch.inf if broken else loss).backward()
            scaler.step(scaled)
            scaler.update()
            scaled.zero_grad()
    assert scaled.finished and scaler.get_scale() == 64
    assert torch.equal(scaled.run.particles.rows, plain.run.particles.rows)
    assert torch.equal(scaled.run.latents.logits, plain.run.latents.logits)


# ---- dllp.prune


@pytest.mark.parametrize(
    "changes",
    [
        {"particles": 2},
        {"particles": 2, "optimizer": "adamw", "lr": 0.01},
        {"particles": 1, "granularity": "weight"},
        {"particles": 3, "init": "fresh", "draw_gates": False},
    ],
)
def test_its_steps_are_those_of_prune(changes: dict[str, Any]) -> None:
    """The same networks, gates and costs, from the same batches, to the last bit."""
    c = config(batch_size=8, epochs=4, **changes)
    seen: list[Tensor] = []
    result = dllp.prune(
        model(), DataLoader(TensorDataset(X, Y), batch_size=8), c,
        on_step=lambda state: seen.append(state.particles.rows.clone()),
    )  # fmt: skip
    ours = dllp.Pruner(model(), X[:2], c, num_data=len(X), steps=12)
    rows = []
    for x, y in batches():
        for network in ours.networks:
            F.cross_entropy(network(x), y).backward()
        ours.step()
        rows.append(ours.run.particles.rows.clone())
    for one, other in zip(rows, seen, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    found = ours.finish()
    assert found.sizes == result.sizes and found.widths == result.widths
    for name, value in result.gates.items():
        if name != "noise":  # of equation 9, which needs labels
            torch.testing.assert_close(found.gates[name], value, rtol=1e-5, atol=1e-6)


def test_its_taught_steps_are_those_of_prune() -> None:
    """The given network teaches from the first step on, or later."""
    for begins in (0.0, 0.5):
        c = config(batch_size=8, epochs=4, teacher="given", teacher_weight=0.7, teacher_from=begins, particles=2)
        result = dllp.prune(model(), DataLoader(TensorDataset(X, Y), batch_size=8), c)
        ours = dllp.Pruner(model(), X[:2], c, num_data=len(X), steps=12)
        assert ours.teacher is not None and not ours.teacher.training
        for x, y in batches():
            answer = ours.teacher(x)
            assert not answer.requires_grad
            for network in ours.networks:
                logits = network(x)
                ours.taught(F.cross_entropy(logits, y), logits, answer).backward()
            ours.step()
        found = ours.finish()
        assert found.widths == result.widths and found.config == result.config
        for a, b in zip(found.particles, result.particles, strict=True):
            for name, value in a.network.state_dict().items():
                torch.testing.assert_close(value, b.network.state_dict()[name], rtol=1e-5, atol=1e-6)
    off = pruner()
    loss = torch.tensor(2.0)
    assert off.teacher is None and off.taught(loss, X, X) is loss


def test_teaching_of_tokens_and_hidden_activations() -> None:
    """Labels of -100 teach nothing; hidden activations add their squared distance."""
    c = {"teacher": "given", "teacher_weight": 0.5, "teacher_temperature": 1.0}
    ours = pruner(c)
    generator = torch.Generator().manual_seed(0)
    logits, answer = (torch.randn(2, 4, 3, generator=generator) for _ in range(2))
    labels = torch.tensor([[0, 1, -100, -100], [2, -100, 1, 0]])
    counted = labels != -100
    loss = torch.tensor(1.25)
    wanted = F.cross_entropy(logits[counted], answer[counted].softmax(-1))
    torch.testing.assert_close(ours.taught(loss, logits, answer, labels=labels), 0.5 * loss + 0.5 * wanted)
    hidden = [(X[:2], X[2:4]), (X[:1], X[1:2])]
    far = sum(F.mse_loss(a, b) for a, b in hidden)
    found = ours.taught(loss, logits, answer, labels=labels, hidden=hidden)
    torch.testing.assert_close(found, 0.5 * loss + 0.5 * (wanted + far))


def test_its_history_is_that_of_prune(tmp_path: Path) -> None:
    """Epochs that the loop closes, measured on data that it hands over; the report shows them."""
    c = config(batch_size=8, epochs=4, particles=2)
    held = DataLoader(TensorDataset(X, Y), batch_size=24)
    result = dllp.prune(model(), DataLoader(TensorDataset(X, Y), batch_size=8), c, validation=held)
    ours = dllp.Pruner(
        model(), X[:2], c, num_data=len(X), steps=12, validation=held, metrics=lambda net, b: {"seen": len(b[0])}
    )
    losses: list[list[float]] = []
    for k, (x, y) in enumerate(batches(), start=1):
        parts = [F.cross_entropy(network(x), y) for network in ours.networks]
        sum(parts).backward()  # type: ignore[union-attr]
        losses.append([float(part.detach()) for part in parts])
        ours.step()
        if k % 3 == 0:
            ours.end_epoch(torch.tensor(losses[-3:]).mean(0).tolist())
        if k == 6:
            kept = ours.state_dict()
    found = ours.finish()
    assert [r["phase"] for r in found.history] == [r["phase"] for r in result.history]
    for k, (one, other) in enumerate(zip(found.history, result.history, strict=True)):
        after = () if k < 2 else ("cost", "validation_loss", "validation_accuracy")  # soft gates are one step ahead
        for name in ("loss", "lr", *after):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
    for one, other in zip(found.info["moments"], result.info["moments"], strict=True):
        assert one["name"] == other["name"] and one["accuracy"] == pytest.approx(other["accuracy"])
        assert one["metrics"][0] == {"seen": 24}
    assert "Training loss" in found.report(tmp_path / "report.html").read_text() and "epochs, training loss" in repr(
        found
    )
    again = dllp.Pruner(model(), X[:2], c, num_data=len(X), steps=12)
    again.load_state_dict(kept)
    assert len(again.run.history) == 2
    with pytest.raises(ConfigError, match="3 values for 2 networks"):
        ours.end_epoch([1.0, 2.0, 3.0])


def test_it_goes_on_bit_for_bit() -> None:
    """From before the gates are decided, and from after."""
    whole = pruner({"particles": 2, "draw_gates": True})
    run(whole)
    for taken in (3, 8):
        first = pruner({"particles": 2, "draw_gates": True})
        run(first, taken)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = pruner({"particles": 2, "draw_gates": True})
        second.load_state_dict(torch.load(file, weights_only=True))
        for k, (x, y) in enumerate(batches()):
            if k >= taken:
                for network in second.networks:
                    F.cross_entropy(network(x), y).backward()
                second.step()
        assert all(equal(a, b) for a, b in zip(second.networks, whole.networks, strict=True))
        assert torch.equal(second.run.latents.logits, whole.run.latents.logits)
    with pytest.raises(DllpError, match="build a new Pruner"):
        whole.load_state_dict(pruner({"particles": 2, "draw_gates": True}).state_dict())
    with pytest.raises(DllpError, match="belongs to another run"):
        pruner({"particles": 2, "beta": 0.3}).load_state_dict(first.state_dict())


# ---- the networks that a loop sees


def test_networks_are_of_the_users_class_with_gates() -> None:
    given = model()
    before = copy.deepcopy(given.state_dict())
    ours = pruner({"particles": 2, "open_until": 0.0, "draw_gates": True})
    first, second = ours.networks
    assert isinstance(first, Net) and type(first).__name__ == "Net" and len(list(first.parameters())) == 7
    assert ours.phase == "soft"
    a, b = first(X), first(X)
    torch.testing.assert_close(a, b)  # gates are drawn once in a step
    torch.testing.assert_close(first(x=X, scale=2.0), 2 * a)
    twin = copy.deepcopy(first)
    assert type(twin) is Net and not torch.allclose(twin(X), a)  # a copy has no gates
    first.loss(X, Y).backward()
    second.loss(X, Y).backward()
    assert first.head.weight.grad is not None
    ours.step()
    assert not torch.allclose(first(X), a)
    first.eval()
    torch.testing.assert_close(first(X), first(X))
    for k, value in given.state_dict().items():
        assert torch.equal(value, before[k])


def test_the_networks_become_small_where_they_are() -> None:
    """References to them stay good, an average of their weights is taken over, and the result is verified."""
    ours = pruner({"particles": 2})
    kept = list(ours.networks)
    average = None
    for x, y in batches():
        for network in kept:
            F.cross_entropy(network(x), y).backward()
        ours.step()
        if ours.phase == "discrete":
            average = average or torch.optim.swa_utils.AveragedModel(kept[0])
            average.update_parameters(kept[0])
    assert kept[0].body[0].out_channels < 7 and ours.finished and ours.cost[0] <= 0.5
    assert average is not None
    kept[0].load_state_dict(average.module.state_dict())
    result = ours.finish()
    for a, b in zip(result.model.parameters(), average.module.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert type(result.model) is Net
    prediction = result.posterior.predict(X)
    assert prediction.mean.shape == (24, 3)


def test_a_scaled_loss_is_unscaled_for_weights_and_gates() -> None:
    """A gradient scaler finds the gates in the parameter groups."""
    plain, scaled = pruner({"particles": 1, "open_until": 0.0}), pruner({"particles": 1, "open_until": 0.0})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # pyright: ignore[reportPrivateImportUsage]
    for x, y in batches(6):
        F.cross_entropy(plain.networks[0](x), y).backward()
        plain.step()
        scaler.scale(F.cross_entropy(scaled.networks[0](x), y)).backward()
        scaler.step(scaled)
        scaler.update()
    torch.testing.assert_close(scaled.run.latents.logits, plain.run.latents.logits)
    torch.testing.assert_close(scaled.run.particles.rows, plain.run.particles.rows)


def test_autocast_of_the_loop_is_respected() -> None:
    ours = pruner({"particles": 1, "open_until": 0.0})
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.networks[0](X).dtype == torch.bfloat16
    assert ours.networks[0](X).dtype == torch.float32


# ---- mistakes


def test_what_a_loop_may_do_wrong() -> None:
    ours = pruner({"particles": 2})
    F.cross_entropy(ours.networks[0](X), Y).backward()
    with pytest.raises(StructureError, match="no gradient has reached particle 2"):
        ours.step()
    ours = pruner({"particles": 1}, steps=1)
    run(ours, 1)
    F.cross_entropy(ours.networks[0](X), Y).backward()
    with pytest.raises(ConfigError, match="had its 1 steps"):
        ours.step()
    ours = pruner({"particles": 1})
    before = ours.run.particles.rows.clone()
    (F.cross_entropy(ours.networks[0](X), Y) * torch.nan).backward()
    with pytest.raises(DllpError, match=r"NaN or infinity in the gradient of particle 1 \(layer head"):
        ours.step()
    assert torch.equal(ours.run.particles.rows, before)
    with pytest.raises(ConfigError, match="optimiser of their own"):
        ours.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match="steps = 0"):
        pruner(steps=0)
    with pytest.raises(ConfigError, match="likelihood = gaussian needs labels"):
        pruner({"likelihood": "gaussian"})
    with pytest.raises(ConfigError, match="teacher = posterior needs all predictions at once"):
        pruner({"teacher": "posterior"})
    with pytest.raises(DllpError, match="fails on a batch"):
        pruner(validation=[(X, X, Y)])
    with pytest.raises(ConfigError, match=r"return factors of 'lr' and 'weight_decay'"):
        pruner(groups=lambda name, p: {"decay": 0})
    with pytest.raises(ConfigError, match="optimizer is a AdamW: give a function"):
        pruner(optimizer=torch.optim.AdamW(model().parameters()))
    with pytest.raises(ConfigError, match="groups is a list: give a function"):
        pruner(groups=[{"lr": 0.1}])
    with pytest.raises(ConfigError, match="did you mean keep_flops"):
        pruner(keep_flop=0.5)
    with pytest.raises(ArtifactError, match="not the state of a Pruner"):
        pruner().load_state_dict(torch.optim.SGD(model().parameters()).state_dict())
    with pytest.raises(StructureError, match="does not fit the network's forward"):
        dllp.Pruner(model(), {"y": X[:2]}, config(), num_data=24, steps=3)


def test_a_run_that_ends_before_its_gates_are_decided_says_so() -> None:
    ours = pruner({"particles": 1})
    run(ours, 3)
    with pytest.warns(UserWarning, match="after 3 of 12 steps: gates are decided only now"):
        assert ours.finish().sizes[0].macs <= 0.5 * ours.structure.flops.dense


def test_options_in_place_of_a_config_and_a_loss_alone() -> None:
    ours = dllp.Pruner(model(), X[:2], config(), num_data=24, steps=3, keep_flops=0.7)
    assert ours.run.config.keep_flops == 0.7
    assert pruner(optimizer="adamw", lr=0.01).run.config.optimizer == "adamw"
    assert ours.run.config.epochs == 3
    run(ours, 1)
    assert ours.end_epoch(0.5, torch.tensor(0.25)).loss == [0.5]
    assert ours.run.history[0].accuracy == [0.25]


def test_all_networks_change_their_mode_together() -> None:
    ours = pruner({"particles": 2})
    ours.eval()
    assert not any(module.training for network in ours.networks for module in network.modules())
    ours.train()
    assert all(module.training for network in ours.networks for module in network.modules())


def test_a_network_in_another_precision_is_converted() -> None:
    with pytest.warns(UserWarning, match="the network is float64: it is pruned as a float32 copy"):
        ours = dllp.Pruner(model().double(), {"x": X[:2]}, config(), num_data=24, steps=3)
    assert ours.networks[0](X).dtype == torch.float32


@pytest.mark.slow
def test_processes_that_share_the_batches(tmp_path: Path) -> None:
    """Two processes with half a batch each end with the same networks, which are those of one."""
    found = []
    for size in (1, 2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command = [*launcher, "-m", "tests.support.own_loop", str(tmp_path / str(size))]
        subprocess.run(command, env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, check=True, timeout=120)
        found += [torch.load(tmp_path / f"{size}.{rank}", weights_only=True) for rank in range(size)]
    alone, first, second = found
    assert torch.equal(first["rows"], second["rows"])
    for name, value in alone["state"].items():
        assert torch.equal(first["state"][name], second["state"][name])
        torch.testing.assert_close(first["state"][name], value, rtol=1e-4, atol=1e-5)
