"""The OpenAI HTTP surface of the gateway."""
