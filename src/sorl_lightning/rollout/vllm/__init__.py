"""The trainer's side of a vLLM server: HTTP, weights, the server's process. Nothing here imports vllm."""
