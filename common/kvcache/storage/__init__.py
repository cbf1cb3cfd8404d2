"""KV storage: pages of host memory as objects of a store that outlives the server and that other servers read. One
backend a file, registered in ``KV_STORAGES`` by its name; ``storage.py`` is the asynchronous part above it."""
