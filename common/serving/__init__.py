"""The HTTP front of a server: routes, lifecycle, and how requests become text. Torch-free."""
