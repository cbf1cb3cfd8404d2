"""The shapes and rules of the HTTP APIs: requests in, answers and events out. No I/O, no torch."""
