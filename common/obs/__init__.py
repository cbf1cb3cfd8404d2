"""Logging, Prometheus metrics and tracing. Torch-free."""
