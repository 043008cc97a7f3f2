"""How versions and tags come into being and go: uploads, checks, publishing, tags, deletion."""
