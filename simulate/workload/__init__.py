"""Requests to simulate: traces in published formats, and synthetic arrivals."""
