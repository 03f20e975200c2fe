"""Losses, batches, outputs and data of any kind through the one verb; docs/how-to/own-loop.md lists the same rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dllp
from dllp import Config, ConfigError, DataError, DllpError, Result, StructureError
from dllp.data import from_pair
from dllp.evaluation.evaluate import dense_posterior, measure
from dllp.prepare import as_labelled
from dllp.records import Size
from tests.support.short_runs import config, network

X, Y = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
TOKENS = torch.randint(0, 11, (24, 5), generator=torch.Generator().manual_seed(2))
TABLE = Path(__file__).parents[2] / "docs" / "how-to" / "own-loop.md"
ROWS: dict[str, Callable[[], Result]] = {}


def row(name: str) -> Callable[[Callable[[], Result]], Callable[[], Result]]:
    """Register a row of the table."""

    def take(run: Callable[[], Result]) -> Callable[[], Result]:
        ROWS[name] = run
        return run

    return take


def prune(model: nn.Module, data: Any, given: Config | None = None, **arguments: Any) -> Result:
    return dllp.prune(model, data, given or config(epochs=2), **arguments)


# ---- networks that answer otherwise


class Output(NamedTuple):
    logits: Tensor
    hidden: Tensor


class Answering(nn.Module):
    """Returns its logits by `pack`."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.pack = network(), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.body(x))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = network(6), nn.Linear(6, 3)

    def forward(self, image: Tensor, scale: Tensor) -> Tensor:
        return self.head(self.body(image).relu() * scale)


class Tagger(nn.Module):
    """A language model as Hugging Face builds them: labels give it a loss, outputs are an object."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.words, self.inner, self.out = nn.Embedding(11, 8), nn.Linear(8, 10), nn.Linear(10, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = self.out(self.inner(self.words(input_ids)).relu())
        if attention_mask is not None:
            logits = logits * attention_mask[..., None]
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))


def segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1))


# ---- outputs


@row("a tuple of outputs")
def _() -> Result:
    return prune(Answering(lambda logits: (logits, logits.mean())), (X, Y))


@row("a dict or object with logits")
def _() -> Result:
    prune(Answering(lambda logits: {"logits": logits}), (X, Y))
    return prune(Answering(lambda logits: Output(logits, logits)), (X, Y))


@row("other outputs")
def _() -> Result:
    result = prune(Answering(lambda logits: {"scores": logits}), (X, Y), select=lambda outputs: outputs["scores"])
    assert result.posterior.predict(X).mean.shape == (24, 3)
    return result


@row("a network that computes its own loss (Hugging Face)")
def _() -> Result:
    data = {"input_ids": TOKENS, "attention_mask": torch.ones(24, 5), "labels": TOKENS % 4}
    result = prune(Tagger(), data, config(epochs=2, batch_size=8), optimizer="adamw", lr=0.01)
    assert result.info["num_data"] == TOKENS.numel()
    found = result.posterior.predict({"input_ids": TOKENS})
    assert found.epistemic.shape == (24, 5) and found.mean.shape == (24, 5, 4)
    return result


# ---- batches and data


@row("several inputs")
def _() -> Result:
    scale = torch.rand(24, 1)
    result = prune(TwoInputs(), (X, scale, Y), config(epochs=2, batch_size=8))
    assert result.posterior.predict((X, scale)).mean.shape == (24, 3)
    return prune(TwoInputs(), DataLoader(TensorDataset(X, scale, Y), batch_size=8))


@row("dict batches")
def _() -> Result:
    data = [{"image": X[k : k + 8], "scale": torch.ones(8, 1), "labels": Y[k : k + 8]} for k in range(0, 24, 8)]
    return prune(TwoInputs(), data)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, Y, strict=True)


@row("a data set of PyTorch")
def _() -> Result:
    return prune(network(), Pairs(), config(epochs=2, batch_size=8))


@row("a stream, with steps")
def _() -> Result:
    steps: list[int] = []
    result = prune(
        network(), DataLoader(Stream(), batch_size=8), steps=2, on_step=lambda state: steps.append(state.total_steps)
    )
    assert steps == [4] * 4
    return result


@row("a list of batches")
def _() -> Result:
    return prune(network(), [(X[k : k + 8], Y[k : k + 8]) for k in range(0, 24, 8)])


# ---- losses


@row("a loss of one's own")
def _() -> Result:
    """Focal loss; the batch is as it was given."""

    def focal(net: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        assert x.dtype == torch.float64
        nll = F.cross_entropy(net(x.float()), y, reduction="none")
        return ((1 - (-nll).exp()) ** 2 * nll).mean()

    return prune(network(), (X.double(), Y), config(epochs=2, batch_size=8), loss=focal)


@row("class weights")
def _() -> Result:
    weight = torch.tensor([1.0, 2.0, 0.5])
    return prune(network(), (X, Y), loss=lambda net, batch: F.cross_entropy(net(batch[0]), batch[1], weight))


@row("label smoothing")
def _() -> Result:
    def smooth(net: nn.Module, batch: Any) -> dict[str, Tensor]:
        logits = net(batch[0])
        loss = F.cross_entropy(logits, batch[1], label_smoothing=0.1)
        return {"loss": loss, "logits": logits, "labels": batch[1]}

    result = prune(network(), (X, Y), loss=smooth, validation=(X, Y))
    assert result.history[-1]["accuracy"] is not None and result.info["moments"][-1]["accuracy"] is not None
    return result


@row("one-hot and soft labels (mixup)")
def _() -> Result:
    soft = 0.7 * F.one_hot(Y, 3).float() + 0.3 * F.one_hot(Y.roll(1), 3).float()
    result = prune(network(), (X, soft), validation=(X, soft))
    assert result.info["moments"][-1]["nll"][0] > 0
    return prune(network(), DataLoader(TensorDataset(X, F.one_hot(Y, 3).float()), batch_size=8))


@row("binary, one logit")
def _() -> Result:
    result = prune(network(1), (X, Y % 2), config(epochs=2, task="binary"))
    found = result.posterior.predict(X)
    assert found.mean.shape == (24, 1) and bool(((found.mean > 0) & (found.mean < 1)).all())
    return prune(nn.Sequential(network(1), nn.Flatten(0)), (X, (Y % 2).float()), config(epochs=2, task="binary"))


@row("multi-label")
def _() -> Result:
    labels = torch.stack([Y % 2, Y == 1, Y > 0], 1).float()
    result = prune(network(), (X, labels), config(epochs=2, task="binary"), validation=(X, labels))
    assert result.info["num_data"] == labels.numel()
    measured = measure(result, from_pair(X, labels)).rows[0].metrics
    assert measured["nll"] == pytest.approx(result.info["moments"][-1]["nll"][0], rel=1e-5)
    assert 0 <= measured["ece"] <= 1
    return result


@row("tokens")
def _() -> Result:
    labels = torch.where(TOKENS == 3, -100, TOKENS % 4)
    result = prune(tagger(), (TOKENS, labels), config(epochs=2, batch_size=8), validation=(TOKENS, labels))
    assert 24 < result.info["num_data"] < TOKENS.numel()  # those that count, by the first batch
    row = measure(result, from_pair(TOKENS, labels, integers=True)).rows[-1].metrics
    moment = result.info["moments"][-1]
    assert row["nll"] == pytest.approx(moment["ensemble"]["nll"], rel=1e-5)
    assert row["perplexity"] == pytest.approx(torch.tensor(row["nll"]).exp().item())
    return result


@row("pixels (segmentation)")
def _() -> Result:
    labels = (X[:, 0] > 0).long() + (X[:, 0] > 1).long()
    result = prune(segmenter(), (X, labels), config(epochs=2, batch_size=8), validation=(X, labels))
    assert result.posterior.predict(X).epistemic.shape == (24, 6, 6)
    row = measure(result, from_pair(X, labels)).rows[-1].metrics
    assert row["nll"] == pytest.approx(result.info["moments"][-1]["ensemble"]["nll"], rel=1e-5)
    return result


# ---- how


@row("options in place of a Config")
def _() -> Result:
    result = dllp.prune(network(), (X, Y), keep_flops=0.6, epochs=2, device="cpu", batch_size=8, lr=0.02)
    assert result.config.keep_flops == 0.6 and result.sizes[0].macs <= 0.6 * result.dense.macs
    assert dllp.prune(network(), (X, Y), config(), epochs=1).config.epochs == 1
    with pytest.raises(ConfigError, match="did you mean keep_flops"):
        dllp.prune(network(), (X, Y), keep_flop=0.6)
    return result


@row("only choose and cut, epochs = 0")
def _() -> Result:
    model = network().eval()
    result = dllp.prune(model, (X, Y), keep_flops=0.6, epochs=0, device="cpu", batch_size=8)
    assert len(result.particles) == 1 and result.history == []
    for a, b in zip(result.model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.isin(a, b).all()  # weights are cut, none is moved
    assert result.sizes[0].macs <= 0.6 * result.dense.macs
    with pytest.raises(ConfigError, match="epochs = 0 only cuts, and needs a budget"):
        dllp.prune(network(), (X, Y), epochs=0, device="cpu")
    return result


@row("a network in half or double precision")
def _() -> Result:
    with pytest.warns(UserWarning, match="the network is float16: it is pruned as a float32 copy"):
        prune(network().half(), (X, Y))
    with pytest.warns(UserWarning, match="the network is float64"):
        return prune(network().double(), (X, Y))


@row("metrics of one's own")
def _() -> Result:
    def metrics(net: nn.Module, batch: Any) -> dict[str, float]:
        return {"margin": float(net(batch[0]).sort(1).values.diff(dim=1)[:, -1].mean()), "seen": float(len(batch[0]))}

    result = prune(network(), (X, Y), metrics=metrics, validation=DataLoader(TensorDataset(X, Y), batch_size=24))
    last = result.info["moments"][-1]["metrics"]
    assert len(last) == len(result.particles) and last[0]["seen"] == 24 and last[0]["margin"] > 0
    return result


@row("a teacher with a loss of one's own")
def _() -> Result:
    def loss(net: nn.Module, batch: Any) -> dict[str, Any]:
        hidden = net[:5](batch[0]) if not isinstance(net, Answering) else None
        logits = net(batch[0])
        found = {"loss": F.cross_entropy(logits, batch[1]), "logits": logits}
        return found if hidden is None else found | {"hidden": logits}

    taught, alone = (
        prune(network(), (X, Y), config(epochs=2, teacher=name, seed=1, particles=1), loss=loss)
        for name in ("given", "off")
    )
    assert taught.history[-1]["loss"] != alone.history[-1]["loss"]
    same = prune(network(), (X, Y), config(epochs=2, seed=1, particles=1), loss=loss, teacher="given")
    assert same.config == taught.config
    with pytest.raises(StructureError, match="a teacher needs logits: let loss return a dict"):
        prune(network(), (X, Y), config(teacher="given"), loss=lambda net, b: F.cross_entropy(net(b[0]), b[1]))
    return taught


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_table(name: str) -> None:
    result = ROWS[name]()
    assert result.sizes[0].macs < result.dense.macs


def test_the_table_in_the_docs_lists_these_rows() -> None:
    listed = re.findall(r"^\| ([^|]+?) +\|", TABLE.read_text(), re.MULTILINE)
    assert set(ROWS) <= set(listed)


def test_a_loss_of_ones_own_takes_the_steps_of_the_tasks() -> None:
    """Cross-entropy given as a function is the built-in one, gates and noise apart."""
    data = DataLoader(TensorDataset(X, Y), batch_size=8)
    one, other = (
        dllp.prune(network_of(3), data, config(epochs=2), loss=loss)
        for loss in (None, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]))
    )
    for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    assert other.history[-1]["accuracy"] is None and one.history[-1]["loss"] == other.history[-1]["loss"]


def network_of(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return network()


def test_what_was_trained_on_can_be_evaluated() -> None:
    """Several inputs in a tuple, a dict, batches, a data set and a loader of it: the same numbers."""
    half = torch.randn(24, 4)
    result = prune(Both(), (TOKENS.float(), half, Y), config(epochs=2, particles=1))
    given = {"first": TOKENS.float(), "second": half, "labels": Y}
    rows = [{name: value[i] for name, value in given.items()} for i in range(24)]
    forms: list[Any] = [
        given, (TOKENS.float(), half, Y), TensorDataset(TOKENS.float(), half, Y), DataLoader(rows, 5),
        [(TOKENS[:9].float(), half[:9], Y[:9]), (TOKENS[9:].float(), half[9:], Y[9:])],
    ]  # fmt: skip
    found = [result.evaluate(form, ood={"same": form}).rows for form in forms]
    for each in found:
        assert [row.data for row in each] == ["clean", "ood:same"]
        assert each[0].metrics == pytest.approx(found[0][0].metrics)
    right = result.posterior.predict((TOKENS.float(), half)).mean[range(24), Y]
    assert found[0][0].metrics["nll"] == pytest.approx(float(-right.log().mean()))
    pairs: list[Any] = [(X, Y), TensorDataset(X, Y), [(X[:9], Y[:9]), (X[9:], Y[9:])]]
    one, *others = (untrained().evaluate(form).rows[0].metrics for form in pairs)
    assert one == others[0] == others[1]


HALF = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
DIVISIBLE: dict[str, Any] = {
    "tuple": (TOKENS.float(), HALF, Y),
    "dict": {"first": TOKENS.float(), "second": HALF, "labels": Y},
    "data set": TensorDataset(TOKENS.float(), HALF, Y),
}


@pytest.mark.parametrize("name", DIVISIBLE)
def test_a_part_of_any_data_set_is_held_out(name: str) -> None:
    seen: list[int] = []
    result = prune(Both(), DIVISIBLE[name], validation=0.25, on_start=lambda state: seen.append(state.num_data))
    assert seen == [18]
    assert [value * 6 % 1 for value in result.history[-1]["validation_accuracy"]] == pytest.approx([0, 0], abs=1e-5)


def test_a_part_of_segmented_images_is_held_out() -> None:
    segmenter = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
    labels = torch.randint(0, 3, (24, 6, 6))
    labels[:, 0] = -100
    assert prune(segmenter, (X, labels), validation=0.25).history[-1]["validation_accuracy"]


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ({"first": TOKENS.float(), "second": X}, {}, "a batch is a dict without labels"),
        (DataLoader(X, 8), {}, "a batch is a Tensor without labels"),
        ([{"first": TOKENS[0], "labels": Y[0]}], {}, "a single example: give a DataLoader"),
        ({"first": TOKENS, "labels": TOKENS}, {}, "labels of tokens in a dict"),
        ((TOKENS, X, Y), {"ood": "noise"}, "names in ood= are for data of one input"),
        ((TOKENS, X, Y), {"corrupt": "sharpen"}, "corrupt= and names"),
        ((X, Y), {"ood": X}, "give inputs of your own as ood="),
    ],
)
def test_what_cannot_be_evaluated(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DllpError, match=words):
        untrained().evaluate(data, **options)


def untrained() -> Result:
    size = Size(1.0, 1)
    return Result(Config(), [], dllp.Posterior([network_of(0)], torch.ones(1)), [], size, [size], {}, {})


class Both(nn.Module):
    """Takes two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 8), nn.Linear(4, 8), nn.Linear(16, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(torch.cat([self.a(first), self.b(second)], 1).relu())


def test_a_saved_run_finds_its_outputs_by_the_same_function(tmp_path: Path) -> None:
    model, found = Answering(lambda logits: {"scores": logits}), lambda outputs: outputs["scores"]
    result = prune(model, (X, Y), select=found)
    result.save(tmp_path / "run")
    again = dllp.load(tmp_path / "run", model, select=found)
    assert torch.equal(again.posterior.predict(X).mean, result.posterior.predict(X).mean)


def test_the_network_before_and_drawn_gates_are_read_as_the_run_was() -> None:
    """Several inputs, and logits that `select` finds."""

    class Scores(Both):
        def forward(self, first: Tensor, second: Tensor) -> Any:
            return {"scores": super().forward(first, second)}

    inputs, find = (TOKENS.float(), HALF), lambda outputs: outputs["scores"]
    result = prune(Scores(), (*inputs, Y), select=find)
    drawn = [dllp.sample_gates(result, x, 2).predict(inputs) for x in (inputs, {"second": HALF, "first": inputs[0]})]
    assert torch.equal(drawn[0].mean, drawn[1].mean)
    known = replace(result, original=Scores())
    rows = measure(known, as_labelled((*inputs, Y)), dense_posterior(known), references=True).rows
    assert {"dense", "reference 1"} <= {row.name for row in rows}


def test_a_stream_goes_on_and_comes_back() -> None:
    from dllp.data import StreamedBatches

    source = StreamedBatches([{"x": torch.full((2,), float(k))} for k in range(5)], 3, 0, torch.device("cpu"))
    seen = [[float(batch["x"][0]) for batch, _ in source.epoch(epoch)] for epoch in range(3)]
    assert seen == [[0, 1, 2], [3, 4, 0], [1, 2, 3]] and source.num_examples == 6
    assert [float(batch["x"][0]) for batch, _ in source.epoch(1, 2)] == [0]
    shuffled = DataLoader(TensorDataset(torch.arange(9)), batch_size=3, shuffle=True)
    orders = [[b[0].tolist() for b, _ in StreamedBatches(shuffled, 4, 7, torch.device("cpu")).epoch(1)] for _ in "ab"]
    assert orders[0] == orders[1]


# ---- mistakes


MISTAKES: list[tuple[str, Any, Any, str]] = [
    ("no scalar", None, lambda net, b: net(b[0]), r"the loss is a tensor of shape \(2, 3\): a scalar is needed"),
    ("no tensor", None, lambda net, b: 1.0, "loss returns a float: return a scalar, or a dict with 'loss'"),
    ("no dependence", None, lambda net, b: net(b[0]).detach().sum(), "does not depend on the network's weights"),
    ("no call", None, lambda net, b: next(net.parameters()).sum(), "loss does not call the network"),
    ("NaN", None, lambda net, b: net(b[0]).sum() * torch.nan, "the loss of the first examples is nan"),
    ("an error", None, lambda net, b: net(b["x"]).sum(), "the loss fails on a batch, TypeError"),
    ("no argument", [{"image": X[:4], "labels": Y[:4]}], None, "the network fails on a batch, TypeError"),
    ("no labels", [{"input": X[:4]}], None, "a batch has input, but no labels, and the network returns no loss"),
    ("torch's loss", None, nn.CrossEntropyLoss(), r"TypeError: .*: it is called as loss\(network, batch\)"),
    ("no batch", [], None, "there is no batch"),
    ("no tensors", [3, 4], None, "holds no tensor of examples"),
    ("lengths", (X, X[:3], Y), None, r"tensors of \[3, 24\] examples"),
    ("no length", iter([(X, Y)]), None, "has no length: give steps="),
]  # fmt: skip


@pytest.mark.parametrize("name", ["loss", "select", "metrics", "groups", "filter_fn"])
def test_what_is_no_function(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is a list: give a function"):
        dllp.prune(network(), (X, Y), config(), **{name: [1]})  # type: ignore[arg-type]


@pytest.mark.parametrize(("data", "loss", "words"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_mistakes_are_one_line(data: Any, loss: Any, words: str) -> None:
    with pytest.raises(DllpError, match=words) as caught:
        dllp.prune(network(), (X, Y) if data is None else data, config(), loss=loss)
    assert "\n" not in str(caught.value)


LATER: dict[str, tuple[Callable[[nn.Module, Any, Tensor], Any], str]] = {
    "no scalar": (lambda net, b, loss: net(b[0]), r"the loss is a tensor of shape \(8, 3\): a scalar is needed"),
    "whole number": (lambda net, b, loss: loss.long(), "a scalar is needed"),
    "no tensor": (lambda net, b, loss: None, "loss returns a NoneType"),
    "no dependence": (lambda net, b, loss: loss.detach(), "the loss of particle 2 does not depend on its weights"),
    "an error": (lambda net, b, loss: b["x"], "the loss fails on a batch, TypeError"),
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("epochs", [0, 3])
def test_a_loss_that_fails_later_is_one_line(name: str, epochs: int) -> None:
    """The first examples are checked before a run; what a later batch does wrong ends it with one line, too."""
    bad, words = LATER[name]
    calls = [0]

    def loss(net: nn.Module, batch: Any) -> Any:
        calls[0] += 1
        good = F.cross_entropy(net(batch[0]), batch[1])
        return good if calls[0] < 4 else bad(net, batch, good)

    words = words.replace("particle 2", r"particle [12]")
    with pytest.raises(DllpError, match=words) as caught:
        dllp.prune(network(), (X, Y), config(epochs=epochs, batch_size=8, particles=2, keep_flops=0.6), loss=loss)
    assert "\n" not in str(caught.value)


def test_a_later_batch_without_what_the_network_takes() -> None:
    whole = {"image": X[:8], "scale": torch.ones(8, 1), "labels": Y[:8]}
    fails = "the network fails on a batch, TypeError.*missing 1 required positional argument: 'scale'"
    for name, words in (("scale", fails), ("labels", "a batch has image, scale, but no labels")):
        without = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(DataError, match=words):
            dllp.prune(TwoInputs(), [whole, without], config())


def test_metrics_that_are_none() -> None:
    for metrics in (lambda net, b: 3, lambda net, b: {"a": "b"}, lambda net, b: net(b["x"])):
        with pytest.raises(DataError, match="metrics fails on a batch"):
            dllp.prune(network(), (X, Y), config(), metrics=metrics, validation=(X, Y))


class Stopped(Exception):
    """A user's own way out of a run."""


def test_a_users_own_exception_passes() -> None:
    def loss(net: nn.Module, batch: Any) -> Any:
        raise Stopped

    with pytest.raises(Stopped):
        dllp.prune(network(), (X, Y), config(), loss=loss)


def test_labels_of_pixels_that_do_not_fit() -> None:
    segmenter, labels = nn.Sequential(nn.Conv2d(1, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1)), torch.full((24, 6, 6), 255)
    labels[:, 1:] = 0
    with pytest.raises(DataError, match=r"label 255 .* use 0\.\.2, and -100 where none counts"):
        prune(segmenter, (X, labels))
    with pytest.raises(DataError, match=r"labels of shape \(3, 6, 6\) .* give the classes, labels\.argmax\(1\)"):
        prune(segmenter, (X, F.one_hot(labels % 3, 3).movedim(-1, 1).float()))


def test_a_loss_that_breaks_later_names_the_step() -> None:
    calls = [0]

    def loss(net: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(net(batch[0]), batch[1]) * (torch.nan if calls[0] > 8 else 1)

    with pytest.raises(dllp.DllpError, match=r"NaN or infinity in the loss of particle .* at step"):
        dllp.prune(network(), (X, Y), config(epochs=9, batch_size=8), loss=loss)


@pytest.mark.parametrize(
    ("labels", "changes", "words"),
    [
        (torch.zeros(24, 2), {"task": "binary"}, "give one from 0 to 1 for each of the 3 outputs"),
        (torch.full((24, 3), 2.0), {"task": "binary"}, "from 2 to 2"),
        (torch.full((24, 2), 0.5), {}, "soft labels of 2 classes for 3 outputs"),
        (torch.zeros(24, 5).long(), {}, r"labels of shape \(5,\) for outputs of shape \(3,\)"),
    ],
)
def test_labels_that_do_not_fit(labels: Tensor, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        dllp.prune(network(), (X, labels), config(**changes))


def test_equation_9_needs_one_label_for_each_example() -> None:
    with pytest.raises(ConfigError, match="need one label for each example"):
        dllp.prune(tagger(), (TOKENS, TOKENS % 4), config(likelihood="gaussian"))
    with pytest.raises(ConfigError, match="task = binary has no noise"):
        config(task="binary", noise="input")
    with pytest.raises(ConfigError, match="is a rate of SGD"):
        config(optimizer="adamw", lr=0.1)
