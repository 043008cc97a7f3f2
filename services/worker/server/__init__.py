"""The API server process: gRPC, validation, sessions, fetches, the link to the engine. No torch."""
