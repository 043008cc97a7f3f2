"""Who may do what: callers, keys, sharing, tenants, signatures, and the audit log."""
