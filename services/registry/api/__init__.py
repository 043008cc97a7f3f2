"""The gRPC API: servicers, and the conversion between records and messages."""
