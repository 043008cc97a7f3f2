"""The plain types of a request and of its answer, which the SDK, the gateway and the worker share.

    sampling   what is asked of the sampler, before and after the gateway resolves the defaults
    output     finish reasons, logprobs, token counts and times
    pooling    which vector of a prompt is computed
    residency  where a worker's adapters are, and how busy it is
    wire       the one conversion of each type to and from its protobuf message

Every module but `wire` is free of protobuf and gRPC.
"""
