"""The gRPC API: InferenceService for clients and AdminService for operators."""
