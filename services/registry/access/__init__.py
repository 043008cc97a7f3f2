"""Callers, keys, permissions, sharing, tenants, signatures and the audit log."""
