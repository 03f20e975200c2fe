"""Devices, processes and fast kernels; nothing here knows the method."""
