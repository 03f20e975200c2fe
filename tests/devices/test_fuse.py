"""Fused norms: what is fused, what is left alone, and that numbers stay the same.

The kernels run in Triton's interpreter here, in a process of their own: it must be chosen before Triton is imported.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton (Linux only)")

PRELUDE = """
import copy, os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from torch import nn
from torch.nn import functional as F
from dllp import zoo
from dllp.devices import fuse
from dllp.devices.fused_norm import FusedNorm
from dllp.zoo.networks import CifarResNet
torch.manual_seed(0)

def fused_names(network):
    found = fuse.rewrite(network.train())
    return {name: m.relu for name, m in found.named_modules() if isinstance(m, FusedNorm)} if found else {}
"""


def interpret(code: str) -> None:
    """Run `code` after the prelude; a failed assertion in it fails the test."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PRELUDE + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_values_gradients_and_statistics_are_those_of_pytorch_in_float64() -> None:
    """With and without residual and ReLU, odd widths, several blocks of channels, several tiles of rows."""
    interpret("""
def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12))

shapes = [(4, 16, 8, 8), (3, 24, 5, 7), (2, 5, 9, 9), (2, 72, 3, 3), (40, 8, 12, 12)]
for shape in shapes:
    for relu, shortcut in ((False, False), (True, False), (True, True), (False, True)):
        norm = nn.BatchNorm2d(shape[1]).train()
        with torch.no_grad():
            norm.weight.normal_(), norm.bias.normal_(), norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
        x, residual, dy = 3 + 2 * torch.randn(shape), torch.randn(shape), torch.randn(shape)
        exact, fused = copy.deepcopy(norm).double(), FusedNorm(copy.deepcopy(norm), relu)
        leaves = [t.clone().requires_grad_() for t in ((x, residual) if shortcut else (x,))]
        wide = [t.detach().double().requires_grad_() for t in leaves]
        y = fused(*leaves)
        z = exact(wide[0]) + (wide[1] if shortcut else 0)
        z = F.relu(z) if relu else z
        found = torch.autograd.grad(y, [*leaves, fused.weight, fused.bias], dy)
        wanted = torch.autograd.grad(z, [*wide, exact.weight, exact.bias], dy.double())
        assert relative(y, z) < 1e-6, (shape, relu, shortcut)
        assert all(relative(a, b) < 2e-6 for a, b in zip(found, wanted)), (shape, relu, shortcut)
        assert relative(fused.running_mean, exact.running_mean) < 1e-6
        assert relative(fused.running_var, exact.running_var) < 1e-6
        assert int(fused.num_batches_tracked) == 1
""")


def test_direct_convolutions_are_those_of_pytorch_in_float64() -> None:
    """Output and both gradients: widths that fill no tile, images smaller than one, weights of either memory format."""
    interpret("""
from dllp.devices import direct_conv
direct_conv.PARTS = 3  # more tiles than programs
shapes = [(2, 16, 8, 8, 16), (3, 8, 5, 7, 16), (9, 16, 6, 4, 8), (1, 24, 5, 5, 3), (2, 3, 6, 6, 16)]
for n, inputs, height, width, outputs in shapes:
    for order in (torch.contiguous_format, torch.channels_last):
        weight = torch.randn(outputs, inputs, 3, 3).contiguous(memory_format=order)
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        conv.weight = nn.Parameter(weight)
        x = torch.randn(n, inputs, height, width, requires_grad=True)
        y = direct_conv.DirectConv(conv)(x)
        dy = torch.randn_like(y)
        wide = [x.detach().double().requires_grad_(), weight.double().requires_grad_()]
        z = F.conv2d(*wide, padding=1)
        found = [y, *torch.autograd.grad(y, [x, conv.weight], dy)]
        wanted = [z, *torch.autograd.grad(z, wide, dy.double())]
        assert all(float((a - b).norm() / b.norm()) < 1e-6 for a, b in zip(found, wanted)), (inputs, outputs, order)
""")


def test_only_plain_convolutions_of_few_channels_are_direct() -> None:
    interpret("""
from dllp.devices.direct_conv import DirectConv
def direct(conv):
    found = fuse.rewrite(nn.Sequential(conv, nn.BatchNorm2d(conv.out_channels)).train())
    return isinstance(found.get_submodule("0"), DirectConv)
plain = dict(kernel_size=3, padding=1, bias=False)
assert direct(nn.Conv2d(16, 8, **plain)) and direct(nn.Conv2d(8, 16, **plain))
others = [dict(stride=2), dict(groups=2), dict(bias=True), dict(padding=0), dict(kernel_size=5), dict(dilation=2),
          dict(padding_mode="reflect")]
assert not any(direct(nn.Conv2d(16, 16, **plain | other)) for other in others)
assert not direct(nn.Conv2d(32, 16, **plain)) and not direct(nn.Conv2d(16, 12, **plain))
assert not direct(nn.Conv2d(16, 16, **plain).double())
""")


def test_a_mean_far_from_zero_costs_no_accuracy() -> None:
    """Sums are taken around the running mean: at 1000 standard deviations a plain sum of squares loses everything."""
    interpret("""
norm = nn.BatchNorm2d(4).train()
x = 1000 + torch.randn(16, 4, 8, 8)
norm.running_mean.fill_(1000)
fused = FusedNorm(copy.deepcopy(norm), relu=False)
wanted = norm.double()(x.double())
assert float((fused(x) - wanted).abs().max()) < 1e-3
""")


def test_networks_of_the_zoo_are_fused_wherever_it_is_possible() -> None:
    interpret("""
for shortcut in ("zero-pad", "projection"):
    network = CifarResNet(1, 10, 3, shortcut, 8)
    norms = {name for name, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    names = fused_names(network)
    assert set(names) == norms
    # a projection's own norm is the residual of the other
    assert {name for name, relu in names.items() if not relu} == {n for n in norms if "shortcut" in n}
    fused = fuse.fuse([network.train()], torch.randn(4, 3, 8, 8))[0]
    assert fused is not network
    parameters, buffers = dict(fused.named_parameters()), dict(fused.named_buffers())
    assert all(parameters[name] is p for name, p in network.named_parameters())
    assert all(buffers[name] is b for name, b in network.named_buffers())
    # ... and its gradients are those of the plain network
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4)
    plain = copy.deepcopy(network)
    wanted = torch.autograd.grad(F.cross_entropy(plain(x), y), list(plain.parameters()))
    found = torch.autograd.grad(F.cross_entropy(fused(x), y), list(network.parameters()))
    assert all(float((a - b).norm() / a.norm()) < 1e-4 for a, b in zip(wanted, found))
""")


def test_weights_given_from_outside_are_used() -> None:
    """Gates are folded into weights by name, and the fused network must listen to them."""
    interpret("""
from torch.func import functional_call
network = CifarResNet(1, 10, 3, "zero-pad", 8).train()
fused = fuse.fuse([network], torch.randn(4, 3, 8, 8))[0]
changed = {name: 0.5 * p.detach() for name, p in network.named_parameters() if name.startswith("blocks.1")}
x = torch.randn(4, 3, 8, 8)
a, b = functional_call(copy.deepcopy(network), changed, (x,)), functional_call(fused, changed, (x,))
torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
""")


def test_what_may_not_be_fused_is_left_alone() -> None:
    interpret("""
class Twice(nn.Module):  # the norm's output has two readers
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
    def forward(self, x):
        y = self.norm(x)
        return F.relu(y) + y

class Shared(nn.Module):  # one module, two calls
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
    def forward(self, x):
        return F.relu(self.norm(F.relu(self.norm(x))))

class Doubled(nn.Module):  # the norm is added to itself
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
    def forward(self, x):
        y = self.norm(x)
        return F.relu(y + y)

class Branches(nn.Module):  # control flow on values cannot be traced
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
    def forward(self, x):
        return F.relu(self.norm(x)) if x.sum() > 0 else x

class Scaled(nn.Module):  # alpha is no plain sum
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
    def forward(self, x):
        return F.relu(torch.add(self.norm(x), x, alpha=2))

x = torch.randn(6, 4, 5, 5)
assert fused_names(Twice()) == fused_names(Doubled()) == fused_names(Scaled()) == {"norm": False}
assert fused_names(Shared()) == {} and fused_names(Branches()) == {}
for make in (Twice, Shared, Doubled, Branches, Scaled):
    network = make().train()
    assert fuse.agree(network, fuse.fuse([network], x)[0], x)
for norm in (nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, momentum=None),
             nn.BatchNorm2d(4, track_running_stats=False), nn.GroupNorm(2, 4)):
    assert fused_names(nn.Sequential(norm, nn.ReLU())) == {}
frozen = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()).train()
frozen[0].eval()
assert fuse.rewrite(frozen) is None
""")


def test_a_network_that_comes_out_different_trains_as_it_is() -> None:
    """Tracing bakes in what is drawn at random, and Python state: the comparison sees it."""
    interpret("""
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
    def forward(self, x):
        return F.relu(self.norm(x)) + torch.rand(4, 1, 1)

class Broadcast(nn.Module):  # the sum is larger than the norm's output
    def __init__(self):
        super().__init__()
        self.norm, self.pool = nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)
    def forward(self, x):
        return F.relu(self.norm(self.pool(x)) + x)

x = torch.randn(6, 4, 5, 5)
for make in (Noisy, Broadcast):
    network = make().train()
    assert fuse.rewrite(network) is not None
    assert fuse.fuse([network], x)[0] is network
""")


def test_where_triton_is_missing_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dllp.devices import fuse

    assert fuse.available()
    monkeypatch.setattr(fuse, "find_spec", lambda name: None)
    assert not fuse.available()


def test_the_core_asks_for_no_kernels_before_they_are_needed() -> None:
    code = "import sys, dllp, dllp.training.trainer; assert 'dllp.devices.fused_norm' not in sys.modules"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0


@pytest.mark.slow
def test_fused_norms_are_computed_again_too() -> None:
    """Stages stay modules with fused norms inside; statistics move once, gradients are those of one pass."""
    interpret("""
from dllp.devices.recompute import Recompute, stages
network = CifarResNet(1, 10, 3, "projection", 4).train()
names, x, y = stages(network), torch.randn(4, 3, 8, 8), torch.arange(4)
parts = fuse.fuse([network], x, names)[0]
assert names == ["blocks.0", "blocks.1", "blocks.2"] and all(parts.get_submodule(name) for name in names)
norms = {name for name, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
assert {name for name, m in parts.named_modules() if isinstance(m, FusedNorm)} == norms
assert all(dict(parts.named_parameters())[name] is p for name, p in network.named_parameters())
start = {name: b.clone() for name, b in network.named_buffers()}
folded = {name: 0.5 * p for name, p in network.named_parameters() if name.startswith("blocks.1")}

def once(again):
    with torch.no_grad():
        for name, b in network.named_buffers():
            b.copy_(start[name])
    if again:
        with Recompute()(parts, names):
            out = torch.func.functional_call(parts, folded, (x,))
    else:
        out = torch.func.functional_call(parts, folded, (x,))
    gradients = torch.autograd.grad(F.cross_entropy(out, y), list(network.parameters()), retain_graph=True)
    return [out, *gradients, *(b.clone() for b in network.buffers())]

for a, b in zip(once(False), once(True), strict=True):
    assert torch.equal(a, b)
chain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).train()
assert fuse.fuse([chain], x, stages(chain)) == [chain], "a chain is taken in pieces, and stays as it is"
""")


def test_a_batch_of_another_size_leaves_the_memory_of_captured_steps_alone() -> None:
    """A graph writes to the partial sums and tickets that it was captured with: they must not be freed, or shared."""
    interpret("""
norm = FusedNorm(nn.BatchNorm2d(16).train(), relu=True)
large, small = torch.randn(32, 16, 16, 16), torch.randn(3, 16, 4, 4)

def places(x):
    norm(x)
    return [[t.data_ptr() for t in pair] for pair in norm._scratch.values()]

first = places(large)
both = places(small)
assert len(first) == 1 and len(both) == 2 and both[0] == first[0]
assert places(large) == both and not any(bool(tickets.any()) for _, tickets in norm._scratch.values())
""")
