"""What a running part says about itself: log lines and Prometheus metrics. Torch-free."""
