"""Metrics, uncertainty and weight distributions of finished runs."""
