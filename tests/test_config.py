"""Every mistake in a configuration is one line; every value survives a round trip."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

import dllp
from dllp import Config, ConfigError, config
from dllp.method import gates, other_priors, schedule
from dllp.training import latents, particles
from paper import jobs

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"keep_flops": 0.0}, r"keep_flops = 0.0: give the fraction to keep, in \(0, 1\]"),
        ({"keep_flops": 1.1}, "keep_flops"),
        ({"keep_flops": -0.5}, "keep_flops"),
        ({"keep_flops": NAN}, "keep_flops"),
        ({"keep_params": 0}, "keep_params"),
        ({"keep_params": 45}, "give the fraction to keep"),
        ({"keep_flops": 0.5, "keep_params": 0.5}, "choose one budget"),
        *[({name: 0}, f"{name} = 0: at least 1") for name in ("particles", "batch_size", "round_to")],
        ({"epochs": -1}, "epochs = -1: it must not be negative"),
        ({"particles": -1}, "particles"),
        *[
            ({name: value}, f"{name} = {value}: a positive number")
            for name in ("lr", "lr_gates", "slab", "prior_scale")
            for value in (0.0, -1.0, NAN, INFINITE)
        ],
        *[
            ({name: value}, f"{name} = {value}: ")
            for name in ("beta", "lr_end", "warmup", "weight_decay", "sparsity", "patience")
            for value in (-1, NAN, INFINITE)
        ],
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"teacher_weight": 1.0}, "teacher_weight"),
        ({"teacher_from": -0.1}, "teacher_from"),
        ({"teacher": "posterior", "task": "regression"}, "teacher = posterior is for classification"),
        ({"epsilon": 20.0}, "epsilon = 20.0 must exceed slab = 20.0"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"open_until": 0.4, "ramp_until": 0.35}, "the schedule"),
        ({"ramp_until": 0.6, "discrete_at": 0.5}, "the schedule"),
        ({"discrete_at": 1.5}, "the schedule"),
        ({"open_until": -0.1}, "the schedule"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"bandwidth": NAN}, "bandwidth"),
        ({"bandwidth": -1}, "bandwidth"),
        ({"task": "regression", "likelihood": "categorical"}, "needs task = classification"),
        *[
            ({name: 10**20}, f"{name} = 1{'0' * 20}: ")
            for name in ("batch_size", "epochs", "patience", "round_to", "seed")
        ],
        *[({"epsilon": value}, f"epsilon = {value}: a finite number") for value in (NAN, INFINITE)],
        ({"accumulate": 8, "batch_size": 4}, r"accumulate \(8\) must not exceed batch_size \(4\)"),
    ],
)
def test_mistakes(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Config(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"granularity": "filter"}, "granularity"),
        ({"task": "ranking"}, "task"),
        ({"init": "warm"}, "init"),
        ({"precision": "int8"}, "precision"),
        ({"engine": "fast"}, "engine"),
        ({"blocks": "layer"}, "blocks"),
        ({"bandwidth": "mean"}, "bandwidth"),
        ({"likelihood": "poisson"}, "likelihood"),
        ({"teacher": "parent"}, "teacher"),
        ({"keep_flops": "0.5"}, "keep_flops"),
        ({"epochs": 2.5}, "epochs"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"sparsity": NAN}, "sparsity"),
        ({"slab_bounds": (30.0, 0.3)}, "slab_bounds"),
    ],
)
def test_mistakes_that_pass_today(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"slab_bounds": (1.0, 500.0)}, r"slab_bounds = \(1.0, 500.0\) end beyond epsilon = 100: the spike"),
        ({"slab_bounds": (1.0, 50.1), "epsilon": 50.0}, "end beyond epsilon = 50"),
        ({"slab_bounds": (1.0, 301.0), "granularity": "weight"}, "end beyond epsilon = 300"),
        ({"prior_scale": 0.1}, r"prior_scale = 0.1 is for prior = laplace, gaussian"),
    ],
)
def test_what_no_run_begins_with_can_still_be_read(values: dict[str, Any], words: str) -> None:
    config = Config.from_dict(Config(**values).as_dict())
    with pytest.raises(ConfigError, match=words):
        config.check_new()
    with pytest.raises(ConfigError, match=words):
        dllp.prune(nn.Linear(2, 2), (torch.randn(4, 2), torch.arange(4) % 2), config)


def test_an_unknown_name_is_told_with_the_nearest_known_one() -> None:
    makers: list[Callable[..., Config]] = [Config, Config.short, Config.paper, partial(replace, Config())]
    for make in makers:
        with pytest.raises(ConfigError, match=r"unknown configuration name 'epoch': did you mean epochs\?$"):
            make(epoch=3)
        with pytest.raises(ConfigError, match=r"unknown configuration name 'zzz': see dllp\.Config for the list$"):
            make(zzz=3)


def test_a_configuration_is_copied_pickled_and_documented_as_any_dataclass() -> None:
    config = Config(keep_flops=0.5, epochs=3)
    assert config == copy.copy(config) == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))  # noqa: S301
    assert list(signature(Config).parameters) == [f.name for f in fields(Config)]


def test_unknown_names_and_types_in_a_file() -> None:
    with pytest.raises(ConfigError, match="unknown configuration name 'keep_flop'"):
        Config.from_dict({"keep_flop": 0.5})
    with pytest.raises(ConfigError, match=r"wrong type|keep_flops"):
        Config.from_dict({"keep_flops": "half"})


@pytest.mark.parametrize("granularity", ["channel", "weight"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_resolved_leaves_nothing_open(granularity: Any, task: Any) -> None:
    config = Config(granularity=granularity, task=task).resolved()
    free = {f.name for f in fields(config) if getattr(config, f.name) is None}
    assert free == {"keep_flops", "keep_params", "keep_latency"}
    assert config.resolved() == config
    assert config.likelihood == ("categorical" if task == "classification" else "gaussian")
    assert config.epsilon == (100 if granularity == "channel" else 300)
    assert config.slab_bounds is not None and config.slab_bounds[0] < config.slab < config.slab_bounds[1]


@pytest.mark.parametrize("granularity", ["channel", "weight"])
@pytest.mark.parametrize("given", [{"slab": 50.0}, {"slab": 0.1}, {"epsilon": 25.0}, {"slab": 250.0, "epsilon": 1e3}])
def test_default_bounds_hold_the_slab_and_end_at_the_spike(granularity: Any, given: dict[str, float]) -> None:
    """Others would take another slab than was asked for, or let the slab become narrower than the spike."""
    config = Config(granularity=granularity, **given).resolved()  # type: ignore[arg-type]
    assert config.slab_bounds is not None and config.epsilon is not None
    assert config.slab_bounds[0] <= config.slab <= config.slab_bounds[1] <= config.epsilon


@pytest.mark.parametrize(
    "given", [{"slab_bounds": (1.0, 100.0)}, {"slab_bounds": (1.0, 500.0), "epsilon": 500.0},
              {"slab_bounds": (1.0, 300.0), "granularity": "weight"}],
)  # fmt: skip
def test_bounds_may_reach_the_spike(given: dict[str, Any]) -> None:
    assert Config(**given).resolved().slab_bounds == given["slab_bounds"]


def test_there_is_one_budget_or_none() -> None:
    assert Config().budget == ("flops", None)
    assert Config(keep_flops=0.5).budget == ("flops", 0.5)
    assert Config(keep_params=0.25).budget == ("params", 0.25)
    assert "budget" not in Config().as_dict()


def test_resolved_keeps_what_was_given() -> None:
    given = dict(weight_decay=0.0, sparsity=0.0, epsilon=50.0, slab_bounds=(1.0, 40.0), likelihood="gaussian")
    config = Config(**given).resolved()  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize("config", [Config(), Config(keep_flops=0.45).resolved(), Config.paper(seed=3, bandwidth=2.0)])
def test_round_trip_through_json(config: Config) -> None:
    assert Config.from_dict(json.loads(json.dumps(config.as_dict(), allow_nan=False))) == config


def test_the_papers_own_setting() -> None:
    config = Config.paper(keep_flops=0.45)
    assert (config.lr, config.lr_end, config.batch_size, config.epochs, config.beta) == (0.1, 0.001, 512, 60, 0.1)
    assert (config.likelihood, config.bandwidth, config.blocks, config.init) == ("gaussian", "paper", "all", "fresh")
    assert (config.granularity, config.draw_gates, config.discrete_at) == ("weight", True, 1.0)
    assert config.keep_flops == 0.45 and Config.paper(epochs=2).epochs == 2


def test_a_configuration_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().seed = 1  # type: ignore[misc]


def test_groups_name_every_field_once_and_machine_counts_in_no_digest() -> None:
    groups = (config.Budget, config.Prior, config.Schedule, config.Optimizer, config.Machine)
    names = [f.name for group in groups for f in fields(group)]
    assert sorted(names) == sorted(f.name for f in fields(Config)) and len(set(names)) == len(names)
    assert {f.name for f in fields(config.Machine)} == jobs.MACHINE


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_retired_options_are_the_constants_that_runs_use(granularity: Any) -> None:
    used = {
        "jitter": particles.JITTER, "gate_logit": gates.INITIAL_LOGIT, "lr_scales": latents.LR_SCALES,
        "tau_start": schedule.TAU_START, "tau_end": schedule.TAU_END, "polarization": other_priors.POLARIZATION,
        "dual_step": gates.DUAL_STEP[granularity], "gap_penalty": gates.GAP_PENALTY[granularity],
        "mean_weight": 0.0, "prior_strength": "bayes", "slab_decay": False,  # of parts that are gone
    }  # fmt: skip
    assert {name: values[granularity] for name, values in config.RETIRED.items()} == used
    stored = Config(granularity=granularity).as_dict() | used
    assert Config.from_dict(stored) == Config(granularity=granularity)
    assert config.check_retired(stored) == Config(granularity=granularity).as_dict()
    with pytest.raises(ConfigError, match=r"tau_end = 0.3 is no option any more, it is always 0.1: remove it"):
        config.check_retired(stored | {"tau_end": 0.3})
