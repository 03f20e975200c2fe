"""Units that magnitude, Taylor, ShortGPT and Wanda remove, against the descriptions of these methods."""

from __future__ import annotations

import torch
from torch import nn

from dllp.structure.groups import discover
from paper.transformers import runner, unit_scores
from tests.support.tiny_llama import llama


@torch.no_grad()
def test_shortgpt_removes_the_blocks_that_change_least() -> None:
    model = llama()
    for k in (1, 3):  # these add nothing to the stream
        model.model.layers[k].self_attn.o_proj.weight.zero_()
        model.model.layers[k].mlp.down_proj.weight.zero_()
    tokens = torch.randint(0, 16, (2, 9))
    small = unit_scores.shortgpt(model, [{"input_ids": tokens}], 0.4)
    assert len(small.model.layers) == 3 and len(model.model.layers) == 5
    torch.testing.assert_close(small(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_wanda_removes_neurons_that_are_silent_or_not_read() -> None:
    model = llama().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[:10] = 0
            layer.mlp.down_proj.weight[:, 10:20] = 0
    tokens = torch.randint(0, 16, (2, 9))
    structure = discover(model, (tokens,), filter_fn=runner.in_blocks)
    share = sum(layer.macs for layer in structure.layers if "mlp" in layer.name) / structure.flops.dense
    small = unit_scores.wanda_neurons(model, structure, [{"input_ids": tokens}], 1 - 20 / 64 * share)
    assert [layer.mlp.down_proj.in_features for layer in small.model.layers] == [44] * 5
    with torch.no_grad():
        torch.testing.assert_close(small(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_scores_of_units_are_sums_over_their_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    structure = discover(model, x)
    found = unit_scores.taylor(model, structure, runner.mean_loss, [(x, y)])
    runner.mean_loss(model, (x, y)).backward()
    first, last, bias = model[0].weight, model[2].weight, model[0].bias
    product = [(w * w.grad).abs().detach() for w in (first, bias, last)]
    wanted = product[0].sum(1) + product[1] + product[2].sum(0)
    torch.testing.assert_close(found, wanted / wanted.mean())
    size = (first.square().sum(1) + bias.square() + last.square().sum(0)).sqrt().detach()
    torch.testing.assert_close(unit_scores.magnitude(model, structure), size / size.mean())
