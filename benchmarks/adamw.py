"""CPU time of a step of AdamW over one of a plain loop: a BERT of MiniLM's size, gates of heads and neurons.

    python benchmarks/adamw.py

Prints one JSON line, of one thread: medians of CPU milliseconds, and of ratios within windows that alternate.
`plain` is `torch.optim.AdamW` as it comes, `fused` with fused=True; `dense` is our step without gates and prior.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from dllp.config import Config
from dllp.prepare import make_gating
from dllp.structure.groups import discover
from dllp.training.particles import Particles
from dllp.training.state import RunState
from dllp.training.step import prepare, step

CPU = torch.device("cpu")
WIDE = ("output.dense", "pooler.dense")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--windows", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=30522, num_labels=6, **shape, **still)
    model = transformers.BertForSequenceClassification(config)
    size = options.batch, options.length
    tokens, mask = torch.randint(0, 30522, size), torch.ones(size, dtype=torch.int64)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(0, 6, size[:1])}
    structure = discover(model, (tokens[:2], mask[:2]), filter_fn=lambda _, name: not name.endswith(WIDE))

    def plain(**more: bool) -> Callable[[], None]:
        network = copy.deepcopy(model).train()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, weight_decay=0.01, **more)

        def once() -> None:
            optimizer.zero_grad()
            network(**batch).loss.backward()
            optimizer.step()

        return once

    def ours(particles: int = 1, *, gates: bool = True) -> Callable[[], None]:
        config = Config(
            particles=particles, optimizer="adamw", lr=1e-5, weight_decay=0.01, keep_flops=0.5, open_until=0.0,
            batch_size=options.batch, device="cpu",
        ).resolved()  # fmt: skip
        made = Particles.start(model, config, CPU)
        gating = make_gating(model, structure, made, config, None) if gates else None
        state = RunState(made, gating, config, num_data=5000, steps_per_epoch=150)
        prepare(state, batch, None)
        return lambda: step(state, batch, None)

    variants = {
        "plain": plain(), "fused": plain(fused=True), "dense": ours(gates=False), "dllp": ours(), "dllp2": ours(2)
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in variants}
    for window in range(-2, options.windows):  # the first two warm up
        for name in variants if window % 2 else reversed(variants):
            began = time.process_time()
            variants[name]()
            if window >= 0:
                times[name].append(time.process_time() - began)

    def ratio(name: str, other: str, times_as_many: int = 1) -> float:
        pairs = zip(times[name], times[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs) / times_as_many, 3)

    print(json.dumps({
        "batch": options.batch, "length": options.length, "torch": torch.__version__,
        "ms": {name: round(1e3 * statistics.median(found), 1) for name, found in times.items()},
        "dense/plain": ratio("dense", "plain"), "dllp/plain": ratio("dllp", "plain"),
        "dllp/fused": ratio("dllp", "fused"), "dllp2/two plain": ratio("dllp2", "plain", 2),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
