"""Certificates, service tokens, and the limit on wrong keys."""
