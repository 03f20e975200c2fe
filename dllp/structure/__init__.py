"""The units of a network that can be removed, what they cost, and the cut itself; the adapter around Torch-Pruning."""
