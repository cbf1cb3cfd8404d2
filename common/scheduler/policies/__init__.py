"""Orders of waiting requests, one policy a file, registered there; request priorities."""
