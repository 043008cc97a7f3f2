"""Composition of the registry."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex_services.common.objects import ObjectStore
from loraplex_services.registry.access.audit import Audit
from loraplex_services.registry.access.keys import Keys
from loraplex_services.registry.access.lookup import Lookup
from loraplex_services.registry.access.sharing import AdapterSharing
from loraplex_services.registry.access.signatures import Signatures
from loraplex_services.registry.access.tenants import Tenants
from loraplex_services.registry.index.catalog import Catalog
from loraplex_services.registry.index.usage import UsageBook
from loraplex_services.registry.index.versions import Versions
from loraplex_services.registry.maintenance.gc import Collector
from loraplex_services.registry.maintenance.indexing import Indexer
from loraplex_services.registry.maintenance.snapshots import Snapshots
from loraplex_services.registry.publish.bases import Bases
from loraplex_services.registry.publish.blobs import Blobs
from loraplex_services.registry.publish.certificates import Certificates
from loraplex_services.registry.publish.claims import Claims
from loraplex_services.registry.publish.deletion import Deletion
from loraplex_services.registry.publish.inspection import Inspector
from loraplex_services.registry.publish.publisher import Publisher
from loraplex_services.registry.publish.retention import Retention
from loraplex_services.registry.publish.scanning import Scans
from loraplex_services.registry.publish.staging import Staging
from loraplex_services.registry.publish.tag_rules import TagRules
from loraplex_services.registry.publish.tags import Tags
from loraplex_services.registry.publish.uploads import Uploads
from loraplex_services.registry.publish.validation import Validations
from loraplex_services.registry.publish.version_tags import VersionTags


@dataclass(frozen=True, slots=True)
class Registry:
    """Everything that the API of the registry calls."""

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
    retention: Retention
    sharing: AdapterSharing
    signatures: Signatures
    certificates: Certificates
    rules: TagRules
    staging: Staging
    lookup: Lookup
    indexer: Indexer
    snapshots: Snapshots
    collector: Collector
    keys: Keys
    usage: UsageBook
    inspector: Inspector


def assemble(
    store: ObjectStore, catalog: Catalog, max_ephemeral_bytes: int | None = None
) -> Registry:
    """Build the parts around one store and one index."""
    audit = Audit(store)
    bases = Bases(store, catalog)
    tenants = Tenants(store, catalog)
    versions = Versions(store, catalog)
    signatures = Signatures(store, audit, tenants)
    certificates = Certificates(store, audit)
    rules = TagRules(tenants, signatures, certificates)
    tags = Tags(store, catalog, versions, audit, rules)
    scans = Scans()
    inspector = Inspector(store, bases, scans, Validations())
    uploads = Uploads(store, scans)
    blobs = Blobs(store, uploads)
    staging = Staging(store, catalog, tags)
    publisher = Publisher(
        store,
        catalog,
        uploads,
        blobs,
        inspector,
        VersionTags(tags, staging, versions),
        versions,
        Claims(store, uploads, tags, versions, tenants),
        audit,
    )
    deletion = Deletion(store, catalog, tags, versions, audit, rules)
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
        deletion=deletion,
        retention=Retention(catalog, deletion, max_ephemeral_bytes),
        signatures=signatures,
        certificates=certificates,
        rules=rules,
        staging=staging,
        sharing=AdapterSharing(store, catalog, audit),
        lookup=Lookup(store, catalog),
        indexer=indexer,
        snapshots=snapshots,
        collector=Collector(store),
        keys=Keys(store),
        usage=UsageBook(store, catalog),
        inspector=inspector,
    )
