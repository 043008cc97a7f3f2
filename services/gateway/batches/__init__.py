"""Files and batch jobs of tenants, kept in the object store."""
