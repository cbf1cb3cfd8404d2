"""Memory that processes of one host share by handles."""
