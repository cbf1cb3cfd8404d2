"""The API server: routes, lifecycle, and the path from requests to text. Torch-free."""
