"""One step at a time: eager on the CPU, and captured graphs that must tell the same story on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dllp
from dllp import zoo
from dllp.config import Config
from dllp.devices import fuse
from dllp.devices.cuda_graph import WARMUP, Capture
from dllp.prepare import make_gating
from dllp.structure.groups import discover
from dllp.training import trainer
from dllp.training.particles import Particles
from dllp.training.state import RunState

cuda = pytest.mark.cuda


class Counter:
    """Counts steps and remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self.seen.append((x, y))


def test_disabled_capture_is_the_step_itself() -> None:
    step, x, y = Counter(), torch.randn(2, 3), torch.arange(2)
    capture = Capture(step, torch.Generator(), enabled=False)
    for key in ("open", "open", "soft", "discrete", "discrete"):
        capture(x, y, key=key)
    assert len(step.seen) == 5 and all(a is x and b is y for a, b in step.seen)
    assert capture.state == "eager" and not capture.graphs
    capture.reset()
    capture(x, y, key="open")
    assert len(step.seen) == 6 and capture.state == "eager"


def test_errors_of_an_eager_step_pass_through() -> None:
    def broken(x: Tensor, y: Tensor) -> None:
        raise RuntimeError("a bug in the network")

    with pytest.raises(RuntimeError, match="a bug in the network"):
        Capture(broken, torch.Generator(), enabled=False)(torch.zeros(1), torch.zeros(1), key="open")


@pytest.mark.parametrize("engine", ["auto", "eager", "graph"])
def test_every_engine_runs_eagerly_on_a_cpu(engine: str) -> None:
    x, y = torch.randn(24, 4), torch.arange(24) % 3
    config = Config(
        engine=engine, device="cpu", epochs=2, batch_size=8, keep_flops=0.6, warmup=0,  # type: ignore[arg-type]
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    assert {record["engine"] for record in dllp.prune(model, (x, y), config).history} == {"eager"}


# ---- on a GPU


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """float32 products in float32, and kernels that add in a fixed order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    products = torch.backends.cuda.matmul  # whose attributes monkeypatch would delete, not restore
    before, products.allow_tf32 = products.allow_tf32, False
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield
    products.allow_tf32 = before


STEPS = 24


def train(engine: str, **changes: object) -> tuple[RunState, list[Tensor]]:
    """24 steps of ResNet-20 through all three phases; the rows after every step, on the CPU."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = zoo.build("resnet20", num_classes=10)
    values: dict[str, object] = dict(
        engine=engine, device="cuda", epochs=1, batch_size=32, keep_flops=0.5, lr=0.02, warmup=0, open_until=0.3,
        ramp_until=0.5, discrete_at=0.65, lr_gates=0.1, init="fresh", deterministic=True,
    )  # fmt: skip
    config = Config(**(values | changes)).resolved()  # type: ignore[arg-type]
    particles = Particles.start(model, config, device)
    gating = make_gating(model, discover(model, torch.randn(2, 3, 32, 32)), particles, config, None)
    state = RunState(particles, gating, config, num_data=1000, steps_per_epoch=STEPS)
    generator = torch.Generator().manual_seed(1)
    # gates far enough apart that rounding does not decide which of them stay
    state.latents.logits += torch.randn(state.latents.logits.shape, generator=generator).to(device)
    batches = [
        (
            torch.randn(32, 3, 32, 32, generator=generator).to(device, memory_format=torch.channels_last),
            torch.randint(10, (32,), generator=generator).to(device),
        )
        for _ in range(STEPS)
    ]

    class Source:
        steps = STEPS

        def epoch(self, epoch: int, start_step: int = 0):
            yield from batches[start_step:]

    rows: list[Tensor] = []
    trainer.train(state, Source(), on_step=lambda t: rows.append(t.particles.rows.cpu()))
    return state, rows


@cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_graphs_and_eager_steps_are_equal(exact: None, monkeypatch: pytest.MonkeyPatch, likelihood: str) -> None:
    """Bit for bit with deterministic kernels, through capture, slicing and capture again."""
    monkeypatch.setattr(fuse, "available", lambda: False)
    eager, expected = train("eager", likelihood=likelihood)
    graph, found = train("graph", likelihood=likelihood)
    assert eager.history[-1].engine == "eager" and graph.history[-1].engine == "graph"
    assert STEPS * 0.3 > WARMUP
    assert graph.latents.keep is not None and eager.latents.keep is not None
    assert torch.equal(graph.latents.keep, eager.latents.keep)
    assert torch.equal(graph.latents.logits, eager.latents.logits)
    for step, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert torch.isfinite(b).all()
        assert torch.equal(a, b), f"step {step}"


@cuda
@pytest.mark.filterwarnings("default")
def test_fused_norms_change_rounding_only(exact: None) -> None:
    """Before the gates close, rows differ by less than 1e-3; afterwards rounding may decide another gate."""
    _, expected = train("eager")
    state, found = train("graph")
    from dllp.devices.fused_norm import FusedNorm

    assert any(isinstance(module, FusedNorm) for module in state.forward.networks[0].modules())
    for step, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert torch.isfinite(b).all()
        if step < STEPS * 0.3:
            assert float((a - b).norm() / a.norm()) < 1e-3, f"step {step}"


@cuda
@pytest.mark.filterwarnings("default")
def test_a_seed_fixes_a_graph_run(exact: None) -> None:
    """Deterministic kernels, the same seed: rows of two runs differ by less than 1e-6, relatively."""
    _, first = train("graph")
    _, second = train("graph")
    assert float((first[-1] - second[-1]).norm() / first[-1].norm()) < 1e-6


@cuda
def test_replays_read_new_batches_and_new_noise() -> None:
    total, noise = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)

    def step(x: Tensor, y: Tensor) -> None:
        total.add_(x)
        noise.copy_(torch.rand(4, generator=generator, device="cuda"))

    capture = Capture(step, generator, enabled=True)
    y, seen = torch.zeros(4, device="cuda"), []
    for i in range(WARMUP + 5):
        capture(torch.full((4,), float(i), device="cuda"), y, key="soft")
        seen.append(noise.tolist())
    assert capture.state == "graph"
    assert total.tolist() == [sum(range(WARMUP + 5))] * 4
    assert len({tuple(values) for values in seen}) == WARMUP + 5


@cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize(
    "changes", [{"recompute": True}, {"accumulate": 3}, {"recompute": True, "accumulate": 2}], ids=str
)
def test_graphs_of_parts_and_of_recomputed_blocks_are_eager_steps(
    exact: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], likelihood: str
) -> None:
    """Bit for bit; and recomputed blocks are those that were kept."""
    monkeypatch.setattr(fuse, "available", lambda: False)
    graph, found = train("graph", likelihood=likelihood, **changes)
    _, expected = train("eager", likelihood=likelihood, **{**changes, "recompute": False})
    assert graph.history[-1].engine == "graph" and not graph.forward._streams
    for step, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(a, b), f"step {step}"


@cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("engine", ["graph", "eager"])
def test_float16_scales_its_loss_and_skips_what_overflows(engine: str, optimizer: str) -> None:
    lr = 0.02 if optimizer == "sgd" else 0.001
    state, rows = train(engine, precision="float16", optimizer=optimizer, lr=lr)
    factor, row, skipped = state.loss_scale.values.tolist()  # type: ignore[union-attr]
    assert state.history[-1].engine == engine and bool(state.healthy) and bool(rows[-1].isfinite().all())
    assert factor == 2.0 ** (16 - skipped) and row <= STEPS - skipped and skipped < STEPS / 2
    still = sum(torch.equal(a, b) for a, b in pairwise(rows))
    assert still == skipped or still == skipped - 1  # one may be the first


@cuda
@pytest.mark.filterwarnings("default")
def test_recomputed_blocks_have_fused_norms() -> None:
    from dllp.devices.fused_norm import FusedNorm

    graph, found = train("graph", recompute=True, precision="bfloat16")
    assert graph.history[-1].engine == "graph" and bool(found[-1].isfinite().all())
    assert any(isinstance(module, FusedNorm) for module in graph.forward.networks[0].modules())
    assert all(graph.forward.networks[0].get_submodule(name) for name in graph.forward.stages)


@cuda
@pytest.mark.filterwarnings("default")
def test_recomputed_dropout_runs_eagerly_and_says_why() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.4), nn.Conv2d(8, 6, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    x, y = torch.randn(96, 3, 8, 8), torch.arange(96) % 3
    config = Config(device="cuda", epochs=2, batch_size=8, keep_flops=0.6, warmup=0, recompute=True, engine="graph")
    engines = {record["engine"] for record in dllp.prune(model, (x, y), config).history}
    assert len(engines) == 1 and "recompute cannot replay the random numbers of dropout" in engines.pop()


@cuda
def test_graphs_of_a_run_that_is_over_do_not_die_within_the_next_capture() -> None:
    """Python collects cycles whenever it likes: here, within the capture."""
    x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def run(step: Callable[[Tensor, Tensor], None]) -> Capture:
        capture = Capture(step, torch.Generator("cuda"), enabled=True)
        for _ in range(WARMUP + 2):
            capture(x, y, key="open")
        return capture

    def collecting(x: Tensor, y: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            gc.collect()
        x.add_(1)

    gc.disable()
    try:
        over = run(lambda x, y: x.mul_(2))
        assert over.state == "graph"
        over.itself = over  # type: ignore[attr-defined]
        del over
        assert run(collecting).state == "graph"
    finally:
        gc.enable()


@cuda
def test_a_new_phase_gives_back_the_memory_of_the_last() -> None:
    capture = Capture(lambda x, y: x.add_(1), torch.Generator("cuda"), enabled=True)
    x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    for phase in ("open", "soft"):
        for _ in range(WARMUP + 2):
            capture(x, y, key=phase)
        assert [key[0] for key in capture.graphs] == [phase]


@cuda
@pytest.mark.filterwarnings("default")
def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why() -> None:
    """Reading a value back to the host is forbidden during capture; no step may be lost or done twice.

    Nor a random number, of the step's generator or of PyTorch's own; and what comes next may be captured again.
    """
    home = torch.cuda.current_stream()

    def run(reads_back: bool, enabled: bool) -> tuple[Capture, list[list[float]]]:
        total, generator = torch.zeros(1, device="cuda"), torch.Generator("cuda").manual_seed(0)
        drawn = torch.zeros(8, device="cuda")
        torch.cuda.manual_seed(1)

        def step(x: Tensor, y: Tensor) -> None:
            drawn[:4] = torch.rand(4, generator=generator, device="cuda")
            drawn[4:] = nn.functional.dropout(x, 0.5) * torch.rand(4, device="cuda")
            if not reads_back or float(x.sum()) > -1:
                total.add_(1)

        capture = Capture(step, generator, enabled=enabled)
        x, y, seen = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda"), []
        for _ in range(WARMUP + 4):
            capture(x, y, key="open")
            seen.append(drawn.tolist())
        assert float(total) == WARMUP + 4
        assert torch.cuda.current_stream() == home
        return capture, seen

    _, expected = run(reads_back=True, enabled=False)
    broken, found = run(reads_back=True, enabled=True)
    assert broken.state.startswith("eager (") and found == expected
    captured, again = run(reads_back=False, enabled=True)
    assert captured.state == "graph" and len({tuple(values) for values in again}) == WARMUP + 4


class Reads(nn.Module):
    """A layer that looks at its input on the host."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().abs().max()) > 0 else x + 1


@cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("granularity", ["channel", "weight"])
@pytest.mark.parametrize(("layer", "engine"), [(nn.Identity, "graph"), (Reads, "eager (")])
def test_runs_with_dropout_and_a_shorter_last_batch_are_those_of_the_eager_engine(
    exact: None, monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module], engine: str, granularity: str
) -> None:
    """Captured, each size of a batch for itself, or begun to be and given up: the same weights to the bit."""
    monkeypatch.setattr(fuse, "available", lambda: False)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), layer(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Dropout(0.4)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    loader = DataLoader(TensorDataset(torch.randn(44, 3, 8, 8), torch.arange(44) % 3), batch_size=16)
    settings = dict(device="cuda", epochs=20, keep_flops=0.65, warmup=0, deterministic=True, granularity=granularity)
    expected, found = (
        dllp.prune(model, loader, Config(engine=name, **settings))
        for name in ("eager", "graph")  # type: ignore[arg-type]
    )
    assert found.history[-1]["engine"].startswith(engine) and expected.history[-1]["engine"] == "eager"
    for ours, theirs in zip(found.particles, expected.particles, strict=True):
        pairs = zip(ours.network.parameters(), theirs.network.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
