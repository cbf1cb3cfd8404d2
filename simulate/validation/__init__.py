"""Validation: what clients of real servers measured, against the simulation of the same requests."""
