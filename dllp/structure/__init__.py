"""Removable units of a network, their cost, and the verified cut; the only room that imports Torch-Pruning."""
