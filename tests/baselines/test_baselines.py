"""Every method under one protocol: it meets the budget, its cut equals the mask, and it does the same twice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dllp.api import Result
from dllp.baselines import METHODS, find, run
from dllp.baselines.protocol import Method, Scene
from dllp.config import Config
from dllp.errors import ConfigError, DataError, StructureError
from dllp.records import ExtractedParticle
from dllp.structure.groups import discover
from dllp.structure.slicing import Fold, cut
from dllp.training.particles import Layout, kept_coordinates
from dllp.zoo import small_cnn, small_resnet
from paper.jobs import Job, Runner
from tests.support.oracles import normal
from tests.support.short_runs import DIGITS

QUICK = {"dcp": "dcp:rounds=2,images=64", "amc": "amc:episodes=6,warmup=3,images=64"}
"""Methods that search, for a short while."""
SHORT = Config(keep_flops=0.4, epochs=2, batch_size=128, init="fresh", lr=0.1, seed=3)


def repaired(particle: ExtractedParticle) -> dict[str, Tensor]:
    """The reference's weights in their full shape, with those of the cut network at the places that it kept."""
    layout = Layout(particle.reference)
    places = kept_coordinates(particle.reference, layout, particle.recipe)
    small, full = dict(particle.network.named_parameters()), {}
    for name, weight in particle.reference.named_parameters():
        full[name] = weight.detach().clone()
        full[name][layout.segments[name].view(places)] = small[name].detach().flatten()
    return full


@pytest.mark.parametrize("name", METHODS)
def test_every_method_keeps_the_protocol(name: str) -> None:
    method = find(QUICK.get(name, name))
    data = DIGITS.train.subset(range(256))
    first, again = (run.prune(method, small_cnn(), data, SHORT, finetune_epochs=2) for _ in range(2))
    for result in (first.before, first.result):
        kept = result.sizes[0].macs / result.dense.macs
        # a channel of this network costs at most 1/32 of it; single weights fill a budget to the last one
        assert 0.4 - (0.04 if method.granularity == "channel" else 1e-4) < kept <= 0.4
    particle = first.before.particles[0]
    x = normal(8, 1, 8, 8)
    reference, small = particle.reference.double(), first.before.model.double()
    weights = dict(reference.named_parameters())
    if method.granularity == "channel":
        fold = Fold(reference, discover(particle.reference, x).groups)
        assert particle.keep is not None
        # As it was cut, and as a method that mends weights left it: nothing but removed channels may tell them apart.
        returned = weights | repaired(particle)
        for cut_network, full in ((cut(reference, particle.recipe), weights), (small, returned)):
            masked = {**full, **fold(full, particle.keep.double())}
            expected = torch.func.functional_call(reference, masked, (x,))
            torch.testing.assert_close(cut_network(x), expected, rtol=1e-9, atol=1e-9)
        mended = {k for k, w in returned.items() if not torch.equal(w, weights[k])}
        assert bool(mended) == (name in ("thinet", "cp", "dcp", "amc")), mended
        assert small(x).shape == (8, 10) and sum(p.numel() for p in small.parameters()) == first.before.sizes[0].params
    else:
        for k, w in small.named_parameters():
            assert (
                torch.equal(w, weights[k] * (w != 0))
                and (first.result.model.state_dict()[k] != 0).sum() <= (w != 0).sum()
            )
    for a, b in ((first.before, again.before), (first.result, again.result)):
        assert all(torch.equal(v, b.model.state_dict()[k]) for k, v in a.model.state_dict().items())
        assert torch.equal(a.gates["keep"], b.gates["keep"]) and a.info["method"] == name
    tuned, untuned = first.result.model.state_dict(), first.before.model.state_dict()
    assert any(not torch.equal(tuned[k].double(), untuned[k].double()) for k in untuned), "fine-tuning moved something"
    assert len(first.result.history) == 4 and first.result.history[-1]["epoch"] == 4


def test_a_residual_network_is_pruned_too() -> None:
    data = (torch.randn(64, 3, 8, 8), torch.arange(64) % 10)
    for name in ("thinet", "cp", "fpgm", "deephoyer", "ccp"):
        pruned = run.prune(METHODS[name], small_resnet(), data, Config(keep_params=0.5, epochs=1, batch_size=32))
        assert pruned.result.sizes[0].params <= 0.5 * pruned.result.dense.params
        assert pruned.after is None and bool(pruned.result.model(data[0][:2]).isfinite().all())


@pytest.mark.parametrize("name", ["magnitude-l1", "magnitude-l2", "slimming"])
def test_fine_tuning_is_by_the_dense_networks_recipe(name: str) -> None:
    used: dict[str, Config] = {}

    def train(verb: run.Verb, stage: str, model: nn.Module, data: Any, config: Config) -> Result:
        used[stage] = config
        return verb(model, data, config)

    config = replace(SHORT, epochs=1, weight_decay=3e-3)
    run.prune(find(name), small_cnn(), DIGITS.train.subset(range(128)), config, finetune_epochs=1, train=train)
    first, second = used[run.TRAINED], used[run.FINETUNED]
    assert second.weight_decay == 3e-3 and second.lr == run.FINETUNE_LR * config.lr and second.init == "given"
    assert first.warmup > 0 and second.warmup == 0, "a network that has learned needs no warm-up"
    assert first.weight_decay == (0.0 if name == "magnitude-l1" else 3e-3), "what replaces it is for the first training"
    run.prune(find(name), small_cnn(), DIGITS.train.subset(range(128)), SHORT, finetune_epochs=1, train=train)
    assert used[run.FINETUNED].weight_decay == Config().resolved().weight_decay, "also of single weights"


def test_fine_tuning_in_a_table_has_the_dense_rows_weight_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[float | None] = []

    def prune(method: Method, model: nn.Module, data: Any, config: Config, **rest: Any) -> None:
        handed.append(config.weight_decay)
        raise DataError("enough is known")

    monkeypatch.setattr(run, "prune", prune)
    job = Job("small_cnn", "baseline", "weight", keep=0.5, baseline="magnitude-l1", finetune=1)
    with pytest.raises(DataError, match="enough"):
        Runner(DIGITS, device="cpu").run(job)
    assert handed == [job.dense.config.resolved().weight_decay] and handed != [job.config.weight_decay]


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if vars(method)])
def test_hyperparameters_are_checked_when_a_method_is_made(name: str) -> None:
    method = METHODS[name]
    for parameter in vars(method):
        for bad in (-100.0, math.inf, math.nan):
            with pytest.raises(ConfigError, match=f"{parameter} = {bad!r}"):
                type(method)(**{parameter: bad})


@dataclass(frozen=True)
class Blind(Method):
    """Scores that say nothing."""

    name = "blind"

    def scores(self, scene: Scene) -> Tensor:
        return torch.zeros(scene.gating.units)


def test_scores_of_a_method_of_ones_own_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
    config = Config(keep_flops=0.5, epochs=1, batch_size=32)
    mistakes = torch.ones(3), torch.full((160,), math.nan)
    for answer in mistakes:
        monkeypatch.setattr(Blind, "scores", lambda self, scene, answer=answer: answer)
        with pytest.raises(ConfigError, match="scores of method blind must be 160 numbers, none of them NaN"):
            run.prune(Blind(), small_cnn(), data, config)


def test_a_result_says_how_it_was_made() -> None:
    data = (torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
    config = Config(keep_flops=0.5, epochs=1, batch_size=32)
    info = run.prune(find("polarization:t=1.1"), small_cnn(), data, config, finetune_epochs=1).result.info
    assert info["method"] == "polarization" and info["hyperparameters"] == {"strength": 3e-4, "least": 0.05, "t": 1.1}
    assert (info["finetune_epochs"], info["finetune_lr"]) == (1, run.FINETUNE_LR)


def test_mistakes_are_one_clear_line() -> None:
    data = (torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
    with pytest.raises(ConfigError, match="no method 'nothing': choose from dllp, random"):
        find("nothing")
    with pytest.raises(ConfigError, match="ccp needs classes, and task = regression has none"):
        run.prune(find("ccp"), small_cnn(), data, Config(keep_flops=0.5, task="regression"))
    with pytest.raises(ConfigError, match="slimming needs a budget"):
        run.prune(find("slimming"), small_cnn(), data, Config())
    with pytest.raises(StructureError, match="cannot be reached"):
        run.prune(find("sfp"), small_cnn(), data, Config(keep_flops=1e-4, epochs=10**6))
    with pytest.raises(StructureError, match="budget cannot be met"):
        run.prune(find("magnitude-l1"), small_cnn(), data, Config(keep_params=1e-4, epochs=10**6))
    with pytest.raises(ConfigError, match="prior = hoyer belongs to dllp itself: method sfp brings its own"):
        run.prune(find("sfp"), small_cnn(), data, Config(keep_flops=0.5, epochs=10**6, prior="hoyer"))
    for bad in ({"finetune_epochs": -1}, {"finetune_epochs": 1, "finetune_lr": math.nan}):
        with pytest.raises(ConfigError, match=r"epochs = -1|lr = nan"):
            run.prune(find("random"), small_cnn(), data, Config(keep_flops=0.5, epochs=10**6), **bad)
    with pytest.raises(ConfigError, match="method sfp has granularity = channel: leave out granularity"):
        run.prune(find("sfp"), small_cnn(), data, Config(keep_flops=0.5, granularity="weight"))
    for text in ("slimming:", "slimming:strength"):
        with pytest.raises(ConfigError, match=r"hyperparameter ''|a number is needed"):
            find(text)


def test_every_method_names_its_paper() -> None:
    assert len(METHODS) == 15
    for name, method in METHODS.items():
        assert method.name == name and method.title and method.paper and 2010 < method.year < 2024
        for figure in method.published:
            assert math.isfinite(figure.drop) and 0 < figure.removed < 100
    drops = {name: [p.drop for p in m.published] for name, m in METHODS.items() if m.published}
    assert drops == {
        "l1-filters": [0.5], "thinet": [0.14], "cp": [0.32], "slimming": [0.53], "sfp": [0.24], "fpgm": [0.1],
        "polarization": [-0.03], "deephoyer": [0.26], "ccp": [0.04], "dcp": [0.31, -0.17], "amc": [0.9],
    }  # fmt: skip
    as_dense = {"random", "magnitude-l2", "l1-filters", "thinet", "cp", "ccp", "dcp", "amc"}
    assert {name for name, m in METHODS.items() if not m.trains} == as_dense
    assert np.unique([m.title for m in METHODS.values()]).size == len(METHODS)
