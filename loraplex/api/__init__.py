"""The plain types that the SDK, the gateway, the worker and the registry share.

    request     prompts, and the requests to a gateway and to a worker
    sampling    sampling parameters, before and after the gateway resolves the defaults
    pooling     which vector of a prompt is computed
    output      finish reasons, logprobs, token counts and times
    residency   where the adapters of a worker are, and how busy it is
    registry    versions, tags and the other records of the registry

Every type has one conversion to and from its protobuf message:

    wire            of the types above but requests and the registry's
    request_wire    of prompts and requests
    registry_wire   of the records of the registry
    format_wire     of the types of `loraplex.adapter_format`
    error_wire      of the errors of `loraplex.errors`

The other modules are free of protobuf and gRPC, so that any folder of a service may import them.
"""
