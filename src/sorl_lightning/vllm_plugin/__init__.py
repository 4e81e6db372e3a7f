"""What runs inside the vLLM server, and the only place that imports vllm. It imports nothing else of the package."""
