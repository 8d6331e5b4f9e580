"""What tests, benchmarks and docs set up around the product: a coordinator, a worker without a model, slow lines."""
