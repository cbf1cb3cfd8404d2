"""Figures of a simulation, as text, JSON and a page with plots."""
