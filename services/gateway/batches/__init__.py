"""Files and batches of tenants, kept in the object store."""
