"""A signature policy that comes while an upload is under way."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from loraplex.api.tenants import Tenant
from loraplex.errors import PermissionDenied
from loraplex.signing import public_pem
from loraplex.v1 import registry_pb2 as pb
from loraplex.v1 import registry_pb2_grpc
from tests.registry.conftest import ServedRegistry
from tests.registry.house import adapter_files, opened


async def test_an_upload_from_before_the_policy_is_not_finished_unsigned(
    served: ServedRegistry,
) -> None:
    session = await opened(served.registry, "acme/a", adapter_files(1))
    key = public_pem(ec.generate_private_key(ec.SECP256R1()).public_key())
    wanted = Tenant("acme", signature_keys=(key,))
    assert (await served.client.admin.set_tenant(wanted, ["signature_keys"])).signature_keys == (
        key,
    )
    channel = served.client._channel
    stub = channel.stub(registry_pb2_grpc.RegistryServiceStub)
    finish = pb.FinishUploadRequest(upload_id=session.upload_id)
    with pytest.raises(PermissionDenied) as refused:
        await channel.call(stub.FinishUpload, finish)
    assert refused.value.reason == "NOT_SIGNED"
    assert [version async for version in served.client.list(tenant="acme")] == []
