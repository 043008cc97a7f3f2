"""The device arena: accounting without torch, and the buffer it accounts for."""
