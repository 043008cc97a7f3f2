"""The connection to the registry: snapshot, references, API keys, tenants, staged tag moves."""
