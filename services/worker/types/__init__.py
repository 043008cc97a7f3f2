"""Plain data that the folders of the worker pass to each other; it imports none of them."""
