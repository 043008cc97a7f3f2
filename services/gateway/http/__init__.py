"""The HTTP API: OpenAI's endpoints, tokenization, vLLM's adapter calls, health and metrics."""
