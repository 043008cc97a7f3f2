"""The parts of a registry, put together once."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.objects import ObjectStore
from services.registry.audit import Audit
from services.registry.bases import Bases
from services.registry.blobs import Blobs
from services.registry.catalog import Catalog
from services.registry.deletion import Deletion
from services.registry.gc import Collector
from services.registry.indexing import Indexer
from services.registry.keys import Keys
from services.registry.lookup import Lookup
from services.registry.publish import Publisher
from services.registry.scanning import Scans
from services.registry.sharing import Sharing
from services.registry.signatures import Signatures
from services.registry.snapshots import Snapshots
from services.registry.staging import Staging
from services.registry.tags import Tags
from services.registry.tenants import Tenants
from services.registry.uploads import Uploads
from services.registry.versions import Versions


@dataclass(frozen=True, slots=True)
class Registry:
    """Everything that a door of the registry calls."""

    store: ObjectStore
    catalog: Catalog
    audit: Audit
    bases: Bases
    tenants: Tenants
    tags: Tags
    versions: Versions
    uploads: Uploads
    blobs: Blobs
    publisher: Publisher
    deletion: Deletion
    sharing: Sharing
    signatures: Signatures
    staging: Staging
    lookup: Lookup
    indexer: Indexer
    snapshots: Snapshots
    collector: Collector
    keys: Keys


def assemble(store: ObjectStore, catalog: Catalog) -> Registry:
    """Build the parts around one store and one index."""
    audit = Audit(store)
    bases = Bases(store, catalog)
    tenants = Tenants(store, catalog)
    versions = Versions(store, catalog)
    signatures = Signatures(store, audit, tenants)
    tags = Tags(store, catalog, versions, audit, signatures)
    scans = Scans()
    uploads = Uploads(store, scans)
    blobs = Blobs(store, uploads)
    staging = Staging(store, catalog, tags, versions, audit)
    publisher = Publisher(
        store, catalog, uploads, blobs, bases, tags, staging, versions, tenants, audit, scans
    )
    snapshots = Snapshots(store)
    indexer = Indexer(store, catalog, uploads, publisher, snapshots)
    catalog.make_index = indexer.ensure
    return Registry(
        store=store,
        catalog=catalog,
        audit=audit,
        bases=bases,
        tenants=tenants,
        tags=tags,
        versions=versions,
        uploads=uploads,
        blobs=blobs,
        publisher=publisher,
        deletion=Deletion(store, catalog, tags, versions, audit, signatures),
        signatures=signatures,
        staging=staging,
        sharing=Sharing(store, catalog, versions, audit),
        lookup=Lookup(store, catalog),
        indexer=indexer,
        snapshots=snapshots,
        collector=Collector(store),
        keys=Keys(store),
    )
