"""Networks that people use, with random weights: 28 convolutional ones, 33 transformers and their relatives.

They come from timm, transformers and torchvision, which no user of the package needs; `make test-zoo` installs them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")
Kind = Literal["convolutional", "transformer"]


@dataclass(frozen=True)
class Network:
    """A network and an example for it.

    Attributes:
        reach: Least share of the multiply-accumulates that must be able to go.
    """

    kind: Kind
    build: Callable[[], nn.Module]
    example: Callable[[], Tensor]
    reach: float = 0.9


def images(size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))


def words(count: int = 32) -> Tensor:
    return torch.randint(3, 256, (1, count), generator=torch.Generator().manual_seed(0))


# ---- timm and torchvision


def _with_operators() -> None:
    """Let torchvision's wheel, built for CUDA, be imported beside a CPU build of torch: it lacks two operators."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def timm_network(name: str, kind: Kind, size: int, reach: float = 0.9, **options: Any) -> Network:
    def build() -> nn.Module:
        _with_operators()
        import timm

        return timm.create_model(name, pretrained=False, **options)

    return Network(kind, build, images(size), reach)


def torchvision_network(name: str, **options: Any) -> Network:
    def build() -> nn.Module:
        _with_operators()
        import torchvision

        return getattr(torchvision.models, name)(weights=None, **options)

    return Network("convolutional", build, images(96))


CONVOLUTIONAL = {
    "resnet18": 96, "resnet50": 96, "resnext50_32x4d": 96, "vgg11_bn": 96, "mobilenetv2_100": 96,
    "mobilenetv3_small_100": 96, "mobilenetv4_conv_small": 96, "efficientnet_b0": 96, "efficientnet_lite0": 96,
    "tf_efficientnetv2_b0": 96, "regnetx_002": 96, "regnety_002": 96, "densenet121": 96, "ghostnet_100": 96,
    "repvgg_a0": 96, "mobileone_s0": 96, "hrnet_w18_small": 96, "dla34": 96, "ese_vovnet19b_dw": 96, "cspresnet50": 96,
    "res2net50_26w_4s": 96, "mixnet_s": 96, "rexnet_100": 96, "inception_v3": 128,
}  # fmt: skip
TRANSFORMERS = {
    "convnext_tiny": 96, "convnextv2_atto": 96, "vit_tiny_patch16_224": 224, "deit_tiny_distilled_patch16_224": 224,
    "swin_tiny_patch4_window7_224": 224, "levit_128s": 224, "cait_xxs24_224": 224, "efficientformer_l1": 224,
    "mixer_s32_224": 224, "resmlp_12_224": 224, "xcit_nano_12_p16_224": 224, "pvt_v2_b0": 224, "tiny_vit_5m_224": 224,
    "maxvit_rmlp_pico_rw_256": 256, "fastvit_t8": 128, "mobilevit_xs": 128, "poolformer_s12": 96,
    "coatnet_pico_rw_224": 224, "edgenext_xx_small": 96,
}  # fmt: skip


class UNet(nn.Module):
    """Four levels of double convolutions, features handed across to the way up."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), classes: int = 5) -> None:
        super().__init__()
        inputs = (3, *widths[:-1])
        self.down = nn.ModuleList(double_conv(i, o) for i, o in zip(inputs, widths, strict=True))
        pairs = list(itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in pairs)
        self.join = nn.ModuleList(double_conv(2 * narrow, narrow) for narrow, _ in pairs)
        self.last = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            across.append(x)
        for up, join, features in zip(reversed(self.up), reversed(self.join), across[-2::-1], strict=True):
            x = join(torch.cat([features, up(x)], 1))
        return self.last(x)


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


# ---- Hugging Face


class Answering(nn.Module):
    """A network of Hugging Face that takes one tensor and returns one."""

    def __init__(self, network: nn.Module, takes: str = "input_ids", returns: str = "logits", **options: Any) -> None:
        super().__init__()
        self.network, self.takes, self.returns, self.options = network, takes, returns, options

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.network(**{self.takes: x}, **self.options), self.returns)


class Translating(nn.Module):
    """An encoder and a decoder that read the same words."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(input_ids=x, decoder_input_ids=x[:, :8], use_cache=False).logits


def hugging_face(
    name: str, task: str, wrap: Callable[[nn.Module], nn.Module], example: Callable[[], Tensor] = words, /,
    **settings: Any,
) -> Network:  # fmt: skip
    def build() -> nn.Module:
        _with_operators()
        import transformers

        config = getattr(transformers, f"{name}Config")(**settings)
        return wrap(getattr(transformers, f"{name}{task}")(config))

    return Network("transformer", build, example)


def _decoding(network: nn.Module) -> nn.Module:
    return Answering(network, use_cache=False)


def _whisper() -> nn.Module:
    _with_operators()
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=128, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=512, max_source_positions=100
    )
    return Answering(WhisperEncoder(config), "input_features", "last_hidden_state")


class Encoder(nn.Module):
    """PyTorch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(256, 128), nn.Linear(128, 5)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.encoder(self.table(x)).mean(1))


GROUPED = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 344, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NETWORKS: dict[str, Network] = {
    **{name: timm_network(name, "convolutional", size) for name, size in CONVOLUTIONAL.items()},
    "nfnet_l0": timm_network("nfnet_l0", "convolutional", 96, reach=0.01),  # its weights are standardised in a forward
    "torchvision shufflenet_v2_x1_0": torchvision_network("shufflenet_v2_x1_0"),
    "torchvision googlenet": torchvision_network("googlenet", init_weights=False, aux_logits=False),
    "UNet": Network("convolutional", UNet, images(64)),
    **{name: timm_network(name, "transformer", size) for name, size in TRANSFORMERS.items()},
    # without a classifier its width is what it returns
    "eva02_tiny_patch14_224": timm_network("eva02_tiny_patch14_224", "transformer", 224, reach=0.8),
    "vit_small_patch14_reg4_dinov2": timm_network(
        "vit_small_patch14_reg4_dinov2", "transformer", 112, img_size=112, depth=4
    ),
    "beit_base_patch16_224": timm_network(
        "beit_base_patch16_224", "transformer", 224, embed_dim=96, depth=4, num_heads=3
    ),
    "Bert": hugging_face(
        "Bert", "ForSequenceClassification", Answering,
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
    ),
    "DistilBert": hugging_face(
        "DistilBert", "ForSequenceClassification", Answering,
        vocab_size=256, dim=128, n_layers=2, n_heads=4, hidden_dim=512,
    ),
    "GPT2": hugging_face(
        "GPT2", "LMHeadModel", _decoding,
        vocab_size=256, n_embd=128, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
    ),
    "Llama, grouped queries": hugging_face("Llama", "ForCausalLM", _decoding, **GROUPED),
    "Qwen3, tied": hugging_face("Qwen3", "ForCausalLM", _decoding, **GROUPED, head_dim=16, tie_word_embeddings=True),
    "Phi3, fused": hugging_face("Phi3", "ForCausalLM", _decoding, **GROUPED),
    "Mixtral, experts": hugging_face(
        "Mixtral", "ForCausalLM", _decoding,
        **GROUPED | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}, num_local_experts=4,
    ),
    "T5": hugging_face(
        "T5", "ForConditionalGeneration", Translating,
        vocab_size=256, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4, decoder_start_token_id=0,
    ),
    "ViT": hugging_face(
        "ViT", "ForImageClassification", lambda network: Answering(network, "pixel_values"), images(64),
        image_size=64, patch_size=8, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
    ),
    "Whisper encoder": Network("transformer", _whisper, lambda: torch.randn(1, 80, 200)),
    "nn.TransformerEncoder": Network("transformer", Encoder, words),
}  # fmt: skip
