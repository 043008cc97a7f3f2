"""Creating and deleting versions and tags: uploads, checks, publishing, staged moves."""
