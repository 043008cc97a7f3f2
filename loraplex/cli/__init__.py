"""The `registry` and `loraplex` commands. Modules here import clients only inside commands."""
