"""Networks against published parameter counts and MACs, and against forward passes written out by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dllp import zoo
from dllp.errors import ConfigError
from dllp.structure.groups import discover
from dllp.structure.initialise import reinitialise
from dllp.structure.slicing import cut, recipe
from dllp.zoo.networks import ZeroPadShortcut


def macs(model: nn.Module, shape: tuple[int, ...]) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(shape))
    return counter.get_total_flops() / 2


@pytest.mark.parametrize(
    ("name", "parameters", "operations"),
    [
        ("resnet20", (0.269e6, 0.273e6), (40.5e6, 41.5e6)),
        ("resnet56", (0.85e6, 0.86e6), (125e6, 127e6)),
        ("vgg11_bn", (9.2e6, 9.3e6), (152e6, 154e6)),
        ("vgg16_bn", (14.7e6, 15.0e6), (312.5e6, 313.9e6)),
    ],
)
def test_cifar_networks_have_the_published_size(name, parameters, operations):
    model = zoo.build(name, 10)
    assert parameters[0] <= sum(p.numel() for p in model.parameters()) <= parameters[1]
    assert operations[0] <= macs(model, (1, 3, 32, 32)) <= operations[1]


def test_resnet50_has_the_published_size():
    model = zoo.build("resnet50", 1000)
    assert 25.5e6 <= sum(p.numel() for p in model.parameters()) <= 25.6e6
    assert 4.08e9 <= macs(model, (1, 3, 224, 224)) <= 4.13e9


@pytest.mark.parametrize("name", [n for n in zoo.names() if n != "resnet50"])
def test_every_network_trains_and_exports(name):
    channels, size = (1, 8) if name in ("mlp", "small_cnn") else (3, 32)
    model = zoo.build(name, 7, channels, image_size=size)
    x = torch.randn(2, channels, size, size)
    model(x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    model.eval()
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
    assert not any(getattr(m, "inplace", False) for m in model.modules())


# ---- forward passes written with torch.nn.functional alone

State = dict[str, Tensor]
BLOCKS = {"small_resnet": 1, "resnet20": 3, "resnet56": 9}
POOLED = {"vgg11_bn": (1, 2, 4, 6, 8), "vgg16_bn": (2, 4, 7, 10, 13)}
"""Convolutions after which VGG pools."""


def conv_bn(s: State, x: Tensor, conv: str, bn: str, stride: int = 1) -> Tensor:
    weight = s[f"{conv}.weight"]
    x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
    return F.batch_norm(x, *(s[f"{bn}.{name}"] for name in ("running_mean", "running_var", "weight", "bias")))


def head(s: State, x: Tensor) -> Tensor:
    return F.linear(x.mean((2, 3)), s["classifier.weight"], s["classifier.bias"])


def shortcut(s: State, x: Tensor, block: str, stride: int) -> Tensor:
    if f"{block}.shortcut.0.weight" in s:
        return conv_bn(s, x, f"{block}.shortcut.0", f"{block}.shortcut.1", stride)
    return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, x.shape[1] // 2, x.shape[1] // 2)) if stride == 2 else x


def cifar_resnet(s: State, x: Tensor, blocks: int) -> Tensor:
    x = F.relu(conv_bn(s, x, "conv", "bn"))
    for k in range(3 * blocks):
        block, stride = f"blocks.{k}", 2 if k in (blocks, 2 * blocks) else 1
        y = F.relu(conv_bn(s, x, f"{block}.conv1", f"{block}.bn1", stride))
        x = F.relu(conv_bn(s, y, f"{block}.conv2", f"{block}.bn2") + shortcut(s, x, block, stride))
    return head(s, x)


def imagenet_resnet50(s: State, x: Tensor) -> Tensor:
    x = F.max_pool2d(F.relu(conv_bn(s, x, "conv", "bn", 2)), 3, stride=2, padding=1)
    for k in range(3 + 4 + 6 + 3):
        block, stride = f"blocks.{k}", 2 if k in (3, 7, 13) else 1
        y = F.relu(conv_bn(s, x, f"{block}.conv1", f"{block}.bn1"))
        y = F.relu(conv_bn(s, y, f"{block}.conv2", f"{block}.bn2", stride))
        x = F.relu(conv_bn(s, y, f"{block}.conv3", f"{block}.bn3") + shortcut(s, x, block, stride))
    return head(s, x)


def plain_cnn(s: State, x: Tensor, pooled: tuple[int, ...]) -> Tensor:
    convs = [name.removesuffix(".weight") for name, value in s.items() if value.ndim == 4]
    bns = [name.removesuffix(".running_mean") for name in s if name.endswith(".running_mean")]
    for k, (conv, bn) in enumerate(zip(convs, bns, strict=True), start=1):
        x = F.relu(conv_bn(s, x, conv, bn))
        x = F.max_pool2d(x, 2) if k in pooled else x
    return head(s, x)


def perceptron(s: State, x: Tensor) -> Tensor:
    x = x.flatten(1)
    for layer in ("linear1", "linear2"):
        x = F.relu(F.linear(x, s[f"{layer}.weight"], s[f"{layer}.bias"]))
    return F.linear(x, s["classifier.weight"], s["classifier.bias"])


@pytest.mark.parametrize("name", zoo.names())
def test_forward_passes_are_those_written_by_hand(name):
    """In float64 and with random statistics: a missing ReLU, stride or shortcut changes the outputs."""
    channels, size = (1, 8) if name in ("mlp", "small_cnn") else (3, 64 if name == "resnet50" else 32)
    torch.manual_seed(0)
    model = zoo.build(name, 5, channels, image_size=size).double().eval()
    state = model.state_dict()
    for key, value in state.items():
        if key.endswith("running_var"):
            value.uniform_(0.5, 1.5)
        elif value.ndim == 1:
            value.normal_(0.3)
    x = torch.randn(2, channels, size, size, dtype=torch.float64)
    if name in BLOCKS:
        expected = cifar_resnet(state, x, BLOCKS[name])
    elif name == "resnet50":
        expected = imagenet_resnet50(state, x)
    else:
        expected = perceptron(state, x) if name == "mlp" else plain_cnn(state, x, POOLED.get(name, (2,)))
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9 * float(expected.detach().abs().max()))


def test_zero_pad_shortcut_places_channel_c_at_c_plus_8():
    x = torch.arange(2 * 16 * 4 * 4).reshape(2, 16, 4, 4).float()
    out = ZeroPadShortcut(16, 32, 2)(x)
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any() and not out[:, 24:].any()


def test_projection_shortcuts_by_option():
    model = zoo.build("resnet20", 10, shortcut="projection")
    assert not any(isinstance(m, ZeroPadShortcut) for m in model.modules())
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_mlp_takes_tables():
    model = zoo.build("mlp", 1, 13, image_size=1, hidden=(8,))
    assert model(torch.randn(5, 13)).shape == (5, 1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("resnet65", 10), {}, "did you mean resnet56"),
        (("zzz", 10), {}, "choose one of mlp, "),
        (("vgg16_bn", 10, 1), {"image_size": 8}, "at least 32x32, not 8x8"),
        (("resnet20", 10), {"shortcut": "none"}, "choose zero-pad or projection"),
    ],
)
def test_mistakes_get_one_line(arguments, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        zoo.build(*arguments, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sides", "message"),
    [
        ("small_cnn", (), "at least 2x2, not rows of a table: choose mlp$"),
        ("small_cnn", (1, 1), "not 1x1: choose mlp or larger images$"),
        ("small_cnn", (8, 1), "not 8x1: choose larger images$"),
        ("mlp", (2, 3), "mlp needs square images, not 2x3: choose small_cnn or such images$"),
        ("mlp", (8, 1), "square images, not 8x1: choose such images$"),
        ("resnet20", (3, 9), "at least 4x4, not 3x9: choose small_cnn or larger images$"),
        ("vgg16_bn", (8, 8), "choose mlp or resnet20 or resnet56 or small_cnn or small_resnet or larger images$"),
    ],
)
def test_networks_that_take_the_images_are_named_instead(name, sides, message):
    with pytest.raises(ConfigError, match=message):
        zoo.check_images(name, sides)


def test_reinitialise_depends_on_the_seed_alone():
    model = zoo.build("small_resnet", 10)
    other = zoo.build("small_resnet", 10)
    before = torch.get_rng_state()
    reinitialise(model, 3)
    reinitialise(other, 3)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    reinitialise(other, 4)
    assert not torch.equal(model.conv.weight, other.conv.weight)


def test_reinitialise_is_kaiming_fan_out_and_resets_statistics():
    model = nn.Sequential(
        nn.Conv2d(64, 256, 3), nn.BatchNorm2d(256), nn.Conv2d(256, 256, 3, groups=256), nn.Linear(4, 4)
    )
    model(torch.randn(2, 64, 8, 8))
    with torch.no_grad():
        model[1].weight.fill_(7)
    reinitialise(model, 0)
    assert float(model[0].weight.detach().std()) == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    assert float(model[2].weight.detach().std()) == pytest.approx((2 / 9) ** 0.5, rel=0.05)
    assert not model[0].bias.any() and not model[1].running_mean.any()
    assert bool((model[1].weight == 1).all())


def test_reinitialise_leaves_what_is_frozen():
    """Fixed filters, a layer frozen in part, and modules that could not start anew but need not."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Flatten(), nn.Linear(16, 2))
    model.register_parameter("offset", nn.Parameter(torch.ones(2), requires_grad=False))
    with torch.no_grad():
        for tensor in (*model.parameters(), model[1].running_mean):
            tensor.fill_(7)
    for parameter in (model[0].weight, model[1].weight, model[1].bias, model[4].bias):
        parameter.requires_grad_(False)
    reinitialise(model, 0)
    for kept in (model.offset, model[0].weight, model[1].weight, model[1].running_mean, model[4].bias):
        assert bool((kept == 7).all())
    for changed in (model[0].bias, model[2].weight, model[4].weight):
        assert not bool((changed == 7).any())


def test_reinitialise_a_cut_transformer_layer():
    layer, x = nn.TransformerEncoderLayer(8, 2, 4, batch_first=True), torch.randn(1, 3, 8)
    structure = discover(layer, x, units="both")
    kinds = [group.kind for group in structure.groups for _ in range(group.units)]
    for closed in ("head", "branch"):  # one head of the attention, or all of it
        keep = torch.ones(structure.units, dtype=torch.bool)
        keep[kinds.index(closed)] = False
        small = cut(layer, recipe(layer, structure.groups, keep))
        reinitialise(small, 0)
        small(x)
        assert closed == "branch" or small.self_attn.in_proj_weight.shape == (12, 8)


def test_reinitialise_reaches_attention_and_names_what_it_cannot_do():
    attention = nn.MultiheadAttention(8, 2)
    weight = attention.in_proj_weight.clone()
    reinitialise(attention, 0)
    assert not torch.equal(weight, attention.in_proj_weight)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    model = nn.Sequential(nn.Linear(2, 2), Scaled())
    weight = model[0].weight.clone()
    with pytest.raises(ConfigError, match=r"module '1' \(Scaled\).*init='given'"):
        reinitialise(model, 0)
    assert torch.equal(weight, model[0].weight)
