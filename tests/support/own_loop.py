"""A loop of the user's own under torchrun: each process takes its half of every batch, and writes what it ends with."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import dllp
from tests.test_pruner import X, Y, config, model


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    pruner = dllp.Pruner(model(), X[:2], config(particles=2), num_data=len(X), steps=12)
    for k in range(12):
        part = [(k * 8 + j) % len(X) for j in range(8)][rank * 8 // size : (rank + 1) * 8 // size]
        for network in pruner.networks:
            network.body[1].eval()  # its statistics would be those of half a batch
            F.cross_entropy(network(X[part]), Y[part]).backward()
        pruner.step()
    result = pruner.finish()
    torch.save({"rows": pruner.run.particles.rows, "state": result.model.state_dict()}, f"{out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
