"""Orders of waiting requests, one policy a file, registered in registry.py; request priorities."""
