"""Costs of steps, transfers and requests: measured on a server, or from the tables that are shipped."""
