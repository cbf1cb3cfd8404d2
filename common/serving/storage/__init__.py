"""Files that clients upload, and batches of requests, on disk: they outlive the server. Torch-free."""
