"""Removable units of a network, their cost, and the verified cut."""
